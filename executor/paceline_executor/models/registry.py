"""From a checkpoint's architecture to the model that computes it. A new architecture is added here.

Apart from the models, each of which knows only itself.
"""

from collections.abc import Callable, Mapping

import torch

from paceline_executor.errors import UnsupportedModelError
from paceline_executor.models.collectives import Collectives
from paceline_executor.models.dummy import DummyWeights
from paceline_executor.models.interface import LanguageModel
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.packed_llama import PackedLlamaModel
from paceline_executor.models.uploaded import UploadedWeights
from paceline_executor.numerics import MatrixKind, Numerics
from paceline_executor.upload.conversion import TORCH_TYPES
from paceline_executor.upload.matrices import Uploader
from paceline_executor.upload.staging import Staging, transfer_to
from paceline_executor.weights.checkpoint import Checkpoint, ModelConfig
from paceline_executor.weights.stored_tensor import StoredType

_Builder = Callable[[Checkpoint, int], LanguageModel]


def _llama_in_float32(checkpoint: Checkpoint, max_model_len: int) -> LlamaModel:
    return LlamaModel(HostWeights(checkpoint), max_model_len)


# Their differences are in the configuration.
_LLAMA_AND_RELATIVES: Mapping[MatrixKind, _Builder] = {
    MatrixKind.DENSE: _llama_in_float32,
    MatrixKind.PACKED: PackedLlamaModel,
}

ARCHITECTURES: Mapping[str, Mapping[MatrixKind, _Builder]] = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen2moe", "qwen3moe", "olmoe", "glm4moe"),
    _LLAMA_AND_RELATIVES,
)


def build_model(checkpoint: Checkpoint, max_model_len: int, weights: MatrixKind) -> LanguageModel:
    """The model runs on the CPU, for positions below `max_model_len`.

    Raises UnsupportedModelError for an architecture this version does not compute, ModelCorruptError for weights.
    """
    return _builders(checkpoint.config.architecture)[weights](checkpoint, max_model_len)


def upload_model(
    checkpoint: Checkpoint,
    device: torch.device,
    max_model_len: int,
    numerics: Numerics,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    collectives: Collectives | None = None,
) -> LlamaModel:
    """On another device. collectives: see LlamaModel.

    on_progress: told how many bytes of how many have been read, often. Raises as `build_model` does.
    """
    _builders(checkpoint.config.architecture)
    with Staging(transfer_to(device)) as staging:
        uploader = Uploader(checkpoint, device, TORCH_TYPES[numerics.dtype], staging, on_progress)
        model = LlamaModel(UploadedWeights(uploader, numerics.matrices), max_model_len, collectives)
        uploader.check()
    return model


def twin_model(
    checkpoint: Checkpoint, max_model_len: int, *, is_rounded: bool = False, collectives: Collectives | None = None
) -> LlamaModel:
    """In float32; see HostWeights and LlamaModel. Raises as `build_model` does."""
    _builders(checkpoint.config.architecture)
    return LlamaModel(HostWeights(checkpoint, is_rounded), max_model_len, collectives)


def dummy_model(
    config: ModelConfig,
    stored: Mapping[str, StoredType],
    device: torch.device,
    max_model_len: int,
    numerics: Numerics,
    collectives: Collectives | None = None,
) -> LlamaModel:
    """The device makes random weights, in groups those that are stored so. Raises UnsupportedModelError."""
    _builders(config.architecture)
    is_float8 = numerics.matrices is MatrixKind.FLOAT8
    stays = stored if numerics.matrices is MatrixKind.AS_STORED else {}
    weights = DummyWeights(config, device, TORCH_TYPES[numerics.dtype], is_float8, stays)
    return LlamaModel(weights, max_model_len, collectives)


def _builders(architecture: str) -> Mapping[MatrixKind, _Builder]:
    kinds = ARCHITECTURES.get(architecture)
    if kinds is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(f"the architecture '{architecture}' is not supported; this version runs: {known}")
    return kinds
