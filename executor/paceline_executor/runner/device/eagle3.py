"""An EAGLE-3 head as a model that drafts on a device: features of all slots, kept as the target computes them.

The feature of position p goes with the token of p + 1, so its rows are one token behind the target's. Refuses to know
rows beyond that, and how a head computes.
"""

from functools import partial

import torch

from paceline_executor.limits import RowLimits
from paceline_executor.models.eagle3 import Eagle3Head
from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.numerics import Numerics
from paceline_executor.runner.device.draft_model import DeviceDraftModel
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.interface import CacheGeometry
from paceline_executor.runner.kv_cache import allocate_on_device
from paceline_executor.weights.hf.eagle3_config import Eagle3Config
from paceline_kernels.attention import Splits
from paceline_kernels.decoder import AuxHidden

_NEVER_DRAWN = -1e30  # finite, and far below what a logit and its noise can be
_LEAST_FLOAT16 = -3e4


def head_geometry(config: Eagle3Config, num_blocks: int, block_size: int, numerics: Numerics) -> CacheGeometry:
    """Counts features, too."""
    layer, num_bytes = config.layer, numerics.dtype.itemsize
    per_token = num_bytes * (2 * layer.num_kv_heads * layer.head_dim + layer.hidden_size)
    return CacheGeometry(num_blocks, block_size, 1, layer.num_kv_heads, layer.head_dim, block_size * per_token)


def drafting_by_head(
    head: Eagle3Head,
    target_ids: torch.Tensor | None,
    numerics: Numerics,
    limits: RowLimits,
    splits: Splits,
) -> MakeDrafting:
    """Allocates what it keeps of rows. target_ids: as in `DeviceHead`. numerics: the target's."""
    geometry = head_geometry(head.config, limits.num_blocks, limits.block_size, numerics)
    kv_cache = allocate_on_device(geometry, numerics.dense_kv, head.device)
    parts = DeviceHead(head, target_ids, kv_cache, limits.num_rows, limits.max_model_len)
    return partial(DeviceDraftModel, parts, limits, splits, observer=parts)


class DeviceHead:
    """See DraftingModel and StatesObserver. Those of slots under the target's block ids; one more is for padding."""

    shift = 1

    def __init__(
        self, head: Eagle3Head, target_ids: torch.Tensor | None, kv_cache: KvCache, num_rows: int, max_len: int
    ) -> None:
        """target_ids: [draft vocabulary] int64, None where ids are the target's."""
        keys, hidden_size = kv_cache.keys, head.config.layer.hidden_size
        _, num_blocks, _, block_size, _ = keys.shape
        self.vocab_size, self.max_model_len = head.config.layer.vocab_size, max_len
        self._head, self._target_ids, self._kv_cache = head, target_ids, kv_cache
        self._num_slots, self._num_rows = num_blocks * block_size, num_rows
        self._of_slots, self._of_rows = (
            torch.zeros((count + 1, hidden_size), dtype=keys.dtype, device=keys.device)
            for count in (self._num_slots, num_rows)
        )
        features = self._of_slots[: self._num_slots].view(1, num_blocks, 1, block_size, hidden_size)
        self.block_tensors = (keys, kv_cache.values, features)

    def states(self, num_tokens: int) -> AuxHidden:
        config, slots = self._head.config, self._of_slots
        shape = (num_tokens, len(config.aux_layers), config.target_hidden_size)
        return AuxHidden(config.aux_layers, torch.empty(shape, dtype=slots.dtype, device=slots.device))

    def observe(self, aux: AuxHidden, slot_mapping: torch.Tensor) -> None:
        self._of_slots.index_copy_(0, _or_last(slot_mapping, self._num_slots), self._head.features(aux.states))

    def hidden(self, inputs: ForwardInputs, rows: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        """What comes first has the target's features, what follows that of the pass before."""
        kv_cache, is_drawn = self._kv_cache.layer(0), rows.shape[0] > 0
        rows = _or_last(rows, self._num_rows)
        slots = _or_last(inputs.slot_mapping, self._num_slots)
        # Behind it a token of each row, and a draw behind that.
        features = self._of_slots[slots] if is_first else self._of_rows[rows]
        if not is_drawn:
            columns = inputs.token_ids, inputs.positions, inputs.slot_mapping
            self._head.write(features, *columns, kv_cache, inputs.splits)
            return features[:0]
        behind, hidden = self._head.forward(features, inputs, kv_cache)
        self._of_rows.index_copy_(0, rows, behind)
        return hidden

    def logits(self, hidden: torch.Tensor, splits: Splits) -> torch.Tensor:
        """Over the target's ids, of which noise is."""
        logits = self._head.logits(hidden, splits)
        if self._target_ids is None:
            return logits
        least = _LEAST_FLOAT16 if logits.dtype == torch.float16 else _NEVER_DRAWN
        spread = torch.full((logits.shape[0], self.vocab_size), least, dtype=logits.dtype, device=logits.device)
        return spread.index_copy_(1, self._target_ids, logits)


def _or_last(indices: torch.Tensor, last: int) -> torch.Tensor:
    """Padding is -1."""
    return torch.where(indices < 0, last, indices).long()
