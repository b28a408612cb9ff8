"""Models that draft in front of the one that is timed: of random weights, for what their passes take.

Knows how each is put together, and what its passes read. What they draft counts for nothing: `drafted_cells` overwrites
it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from gpu.rigs import Place, random_model
from paceline_executor.device_numerics import DeviceNumerics
from paceline_executor.limits import RowLimits
from paceline_executor.models.device_eagle3 import DeviceEagle3Head
from paceline_executor.models.llama import LlamaModel
from paceline_executor.runner.device.draft_model import DeviceDraftModel, DraftModelParts
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.device.eagle3 import DeviceHead, head_geometry
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry
from paceline_executor.testing.models import TINY_CONFIG
from paceline_executor.upload.matrices import MatrixKind
from paceline_executor.weights.checkpoint import ModelConfig, Rope
from paceline_executor.weights.hf.eagle3_config import Eagle3Config
from paceline_kernels.attention import Splits

DrafterConfig = ModelConfig | Eagle3Config
MODEL, HEAD = "a 1B model", "an EAGLE-3 head"
_LLAMA_1B = ModelConfig(
    architecture="llama",
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128256,
    max_model_len=131072,
    rms_norm_eps=1e-5,
    rope=Rope(500_000.0),
    tie_word_embeddings=True,
)
_PUBLISHED_DRAFT_VOCABULARY = 32_000
_SPREAD = 0.02  # of random weights


def drafters_of(target: ModelConfig) -> Mapping[str, DrafterConfig]:
    """In front of Llama-3-8B's shape; a tiny target has tiny ones."""
    is_tiny = target.vocab_size == TINY_CONFIG.vocab_size
    layers = (1,) if is_tiny else (2, target.num_layers // 2, target.num_layers - 3)
    head = Eagle3Config(
        layer=replace(target, num_layers=1),
        draft_vocab_size=target.vocab_size // 2 if is_tiny else _PUBLISHED_DRAFT_VOCABULARY,
        target_hidden_size=target.hidden_size,
        aux_layers=layers,
        norm_before_residual=True,
    )
    return {MODEL: replace(TINY_CONFIG, max_model_len=target.max_model_len) if is_tiny else _LLAMA_1B, HEAD: head}


@dataclass(frozen=True, slots=True)
class DraftingModel:
    """Ready on the device."""

    make: MakeDrafting
    step_bytes: int  # that it reads once in a step
    pass_bytes: int  # that it reads for each draft


def drafting_model(
    config: DrafterConfig, place: Place, numerics: DeviceNumerics, limits: RowLimits, target: LlamaModel
) -> DraftingModel:
    """numerics: the target's."""
    own = replace(numerics, kv=numerics.dense_kv)
    if isinstance(config, Eagle3Config):
        return _head(config, place, own, limits, target)
    geometry = kv_geometry(config, limits.num_blocks, limits.block_size, own)
    cache = allocate_on_device(geometry, own.kv, place.device.torch_device)
    model = random_model(place, config, own, limits.max_model_len)
    parts = DraftModelParts(model, cache, config.vocab_size, limits.max_model_len)
    return DraftingModel(partial(DeviceDraftModel, parts, limits, Splits.EVEN), 0, bytes_read(config, own))


def bytes_read(config: ModelConfig, numerics: DeviceNumerics) -> int:
    """By a pass of a row: its weights, but for an embedding of which it takes one line."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * numerics.dtype.itemsize
    return numerics.weight_bytes(config, {}) - embedding


def _head(
    config: Eagle3Config, place: Place, numerics: DeviceNumerics, limits: RowLimits, target: LlamaModel
) -> DraftingModel:
    device, shapes = place.device.torch_device, config.tensor_shapes()
    is_float8 = numerics.matrices is MatrixKind.FLOAT8

    def tensor(name: str) -> torch.Tensor:
        return _SPREAD * torch.randn(shapes[name], dtype=numerics.dtype, device=device)

    head = DeviceEagle3Head(config, tensor, target.embed, limits.max_model_len, is_float8=is_float8)
    stride = config.layer.vocab_size // config.draft_vocab_size
    target_ids = stride * torch.arange(config.draft_vocab_size, device=device)
    cache = allocate_on_device(
        head_geometry(config, limits.num_blocks, limits.block_size, numerics), numerics.kv, device
    )
    parts = DeviceHead(head, target_ids, cache, limits.num_rows, limits.max_model_len)
    size = 1 if is_float8 else numerics.dtype.itemsize
    reduction = size * math.prod(shapes["fc.weight"])
    matrices = size * sum(math.prod(shape) for shape in shapes.values())
    make = partial(DeviceDraftModel, parts, limits, Splits.EVEN, observer=parts)
    return DraftingModel(make, reduction, matrices - reduction)
