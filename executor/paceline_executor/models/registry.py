"""From a checkpoint's architecture to the model that computes it. The place where a new architecture is added.

Apart from the models, each of which knows only itself.
"""

from collections.abc import Callable, Mapping

import torch

from paceline_executor.errors import UnsupportedModelError
from paceline_executor.models.interface import Model
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.packed_llama import PackedLlamaModel
from paceline_executor.numerics import WeightKind
from paceline_executor.weights.checkpoint import Checkpoint

_Builders = Mapping[WeightKind, Callable[[Checkpoint, torch.device, int], Model]]
# What one of these has and another has not is in the configuration.
_LLAMA_AND_RELATIVES: _Builders = {WeightKind.FLOAT32: LlamaModel, WeightKind.PACKED: PackedLlamaModel}

ARCHITECTURES: Mapping[str, _Builders] = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"), _LLAMA_AND_RELATIVES
)


def build_model(checkpoint: Checkpoint, device: torch.device, max_model_len: int, weights: WeightKind) -> Model:
    """Read all weights and put the model together on the device, for positions below `max_model_len`.

    Raises UnsupportedModelError for an architecture this version does not compute.
    """
    architecture = checkpoint.config.architecture
    kinds = ARCHITECTURES.get(architecture)
    if kinds is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(f"the architecture '{architecture}' is not supported; this version runs: {known}")
    return kinds[weights](checkpoint, device, max_model_len)
