"""Models that draft in front of the one that is timed: of random weights, for what their passes take.

Knows how each is put together. What they draft counts for nothing: `drafted_cells` overwrites
it.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from gpu.cells import HEAD, MODEL
from gpu.rigs import LLAMA_8B, Place
from paceline_executor.limits import RowLimits
from paceline_executor.models.eagle3 import Eagle3Head
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.registry import dummy_model
from paceline_executor.numerics import Numerics
from paceline_executor.runner.device.draft_model import drafting_by_model
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.device.eagle3 import drafting_by_head
from paceline_executor.start.kernel_compiling import DraftModelShape, HeadShape
from paceline_executor.upload.conversion import TORCH_TYPES
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_executor.weights.hf.eagle3_config import Eagle3Config
from paceline_kernels.attention import Splits

DrafterConfig = ModelConfig | Eagle3Config
_LLAMA_1B = replace(
    LLAMA_8B, num_layers=16, hidden_size=2048, intermediate_size=8192, head_dim=64, tie_word_embeddings=True
)
_PUBLISHED_DRAFT_VOCABULARY = 32_000
_SPREAD = 0.02  # of random weights


def drafters_of_8b() -> Mapping[str, DrafterConfig]:
    """Shaped as those that are published for it."""
    last = LLAMA_8B.num_layers
    return {MODEL: _LLAMA_1B, HEAD: _head_config(LLAMA_8B, _PUBLISHED_DRAFT_VOCABULARY, (2, last // 2, last - 3))}


def tiny_drafters(target: ModelConfig) -> Mapping[str, DrafterConfig]:
    """For a rehearsal."""
    return {MODEL: target, HEAD: _head_config(target, target.vocab_size // 2, (1,))}


def _head_config(target: ModelConfig, draft_vocab_size: int, aux_layers: tuple[int, ...]) -> Eagle3Config:
    return Eagle3Config(
        layer=replace(target, num_layers=1),
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        aux_layers=aux_layers,
        norm_before_residual=True,
    )


def shape_of(config: DrafterConfig, numerics: Numerics) -> DraftModelShape | HeadShape:
    """What its launches depend on. numerics: the target's."""
    own = _own(numerics)
    if isinstance(config, Eagle3Config):
        return HeadShape(config, own, has_embedding=False, has_ids=True)
    return DraftModelShape(config, own, {})


def timed_drafter(
    config: DrafterConfig, place: Place, numerics: Numerics, limits: RowLimits, target: LlamaModel
) -> MakeDrafting:
    """Ready on the device. numerics: the target's."""
    own = _own(numerics)
    if isinstance(config, Eagle3Config):
        return _head(config, place, own, limits, target)
    device = place.device.torch_device
    model = dummy_model(config, {}, device, limits.max_model_len, own)
    return drafting_by_model(model, config, own, limits, limits.max_model_len, Splits.EVEN, device)


def _own(numerics: Numerics) -> Numerics:
    return replace(numerics, kv=numerics.dense_kv)


def _head(
    config: Eagle3Config, place: Place, numerics: Numerics, limits: RowLimits, target: LlamaModel
) -> MakeDrafting:
    device, shapes = place.device.torch_device, config.tensor_shapes()

    def tensor(name: str) -> torch.Tensor:
        return _SPREAD * torch.randn(shapes[name], dtype=TORCH_TYPES[numerics.dtype], device=device)

    head = Eagle3Head(config, tensor, target.embed, limits.max_model_len, numerics.matrices)
    stride = config.layer.vocab_size // config.draft_vocab_size
    target_ids = stride * torch.arange(config.draft_vocab_size, device=device)
    return drafting_by_head(head, target_ids, numerics, limits, Splits.EVEN)
