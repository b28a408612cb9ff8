"""What drafts on a device beside the model: a smaller model, a copy of the model, or an EAGLE-3 head.

Its headers are read, its weights are not. Knows what a drafter takes of the device's memory, and how it is put
together; refuses to know how weights come to a device.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline_executor.limits import RowLimits
from paceline_executor.models.eagle3 import read_head
from paceline_executor.models.interface import LanguageModel
from paceline_executor.models.rope import rotation_bytes
from paceline_executor.numerics import Numerics
from paceline_executor.runner.device.buckets import Buckets
from paceline_executor.runner.device.draft_model import NUM_PASSES, most_tokens
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.device.eagle3 import drafting_by_head, head_geometry
from paceline_executor.runner.device.memory_plan import STEP_TOKEN_BYTES, activation_bytes
from paceline_executor.upload.conversion import TORCH_TYPES
from paceline_executor.weights.checkpoint import Checkpoint, ModelConfig
from paceline_executor.weights.hf.eagle3 import Eagle3Checkpoint
from paceline_executor.weights.stored_tensor import StoredType
from paceline_kernels.linear import Splits


@dataclass(frozen=True, slots=True)
class DraftBytes:
    weights: int = 0
    per_token: int = 0  # of KV cache
    activations: int = 0
    kept: tuple[int, ...] = ()  # of each captured pass
    per_step_token: int = 0  # of the target's steps


@dataclass(frozen=True, slots=True)
class DeviceDraft:
    """A draft model. Keys and values are of the type it computes in."""

    checkpoint: Checkpoint
    numerics: Numerics
    stored: Mapping[str, StoredType]
    is_copy: bool = False  # of the target

    @property
    def bytes_per_token(self) -> int:
        """Of its KV cache."""
        return self.numerics.bytes_per_token(self.checkpoint.config)

    def max_model_len(self, limits: RowLimits) -> int:
        return min(limits.max_model_len, self.checkpoint.config.max_model_len)

    def bytes_of(self, limits: RowLimits, sizes: Buckets) -> DraftBytes:
        model = self.checkpoint.config
        weights = self.numerics.weight_bytes(model, self.stored) + rotation_bytes(model, self.max_model_len(limits))
        return _bytes_of(weights, self.bytes_per_token, model, self.numerics, limits, sizes)


@dataclass(frozen=True, slots=True)
class DeviceHeadDraft:
    """An EAGLE-3 head."""

    checkpoint: Eagle3Checkpoint
    numerics: Numerics  # the target's

    @property
    def bytes_per_token(self) -> int:
        """Of its KV cache and features."""
        return head_geometry(self.checkpoint.config, 1, 1, self.numerics).bytes_per_block

    def bytes_of(self, limits: RowLimits, sizes: Buckets) -> DraftBytes:
        """A step of the target has hidden states for it, and the feature that they become."""
        config, num_bytes = self.checkpoint.config, self.numerics.dtype.itemsize
        weights = self.checkpoint.num_parameters() * num_bytes + rotation_bytes(config.layer, limits.max_model_len)
        width = len(config.aux_layers) * config.target_hidden_size + config.layer.hidden_size
        return _bytes_of(weights, self.bytes_per_token, config.layer, self.numerics, limits, sizes, width * num_bytes)

    def drafting(self, target: LanguageModel, device: torch.device, limits: RowLimits, splits: Splits) -> MakeDrafting:
        """Reads its weights."""
        kind, dtype = self.numerics.matrices, TORCH_TYPES[self.numerics.dtype]
        head = read_head(self.checkpoint, target.embed, limits.max_model_len, kind, device, dtype)
        ids = self.checkpoint.target_ids
        target_ids = None if ids is None else torch.from_numpy(ids).to(device, torch.int64)
        return drafting_by_head(head, target_ids, self.numerics, limits, splits)


Draft = DeviceDraft | DeviceHeadDraft


def _bytes_of(
    weights: int,
    per_token: int,
    model: ModelConfig,
    numerics: Numerics,
    limits: RowLimits,
    sizes: Buckets,
    per_step_token: int = 0,
) -> DraftBytes:
    num_tokens, num_bytes = most_tokens(limits.max_num_batched_tokens), numerics.dtype.itemsize
    num_rows = sorted({size.num_rows for size in sizes if not size.is_decode})
    of_row = 4 * limits.max_blocks_per_row + model.hidden_size * num_bytes
    return DraftBytes(
        weights=weights,
        per_token=per_token,
        activations=activation_bytes(model, num_tokens, limits.num_rows, num_bytes),
        kept=tuple(rows * of_row + num_tokens * STEP_TOKEN_BYTES for rows in num_rows for _ in range(NUM_PASSES)),
        per_step_token=per_step_token,
    )
