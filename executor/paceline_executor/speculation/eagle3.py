"""Drafts from an EAGLE-3 head, which reads hidden states that the target computed for the row.

Knows which positions of a row the head has computed, where what it needs for the next ones lies, and how its ids lead
to the target's. It refuses to know how a head computes (`models.eagle3` does).

The feature of position p and the token of p + 1 make keys and values in slot p of the row's own blocks. So the head's
cache follows the target's: every step of the target writes it, copies of blocks are made in both, shared blocks are
shared. Only the last position of a row waits, until the next token is known. Its feature is kept with its block, as is
that of a block's last slot: a row that shares the block may go on with another token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline_executor.models.eagle3 import Eagle3Head
from paceline_executor.models.interface import ForwardInputs
from paceline_executor.numerics import KvDtype
from paceline_executor.runner.drafter import WantedDrafts, WantingRow, block_tables, draws_behind
from paceline_executor.runner.inputs import logit_rules, sampling_parameters, slots_of
from paceline_executor.runner.interface import CacheGeometry, FlatBatch, Float32Array, Int32Array, SamplingColumns
from paceline_executor.runner.kv_cache import allocate_kv_cache
from paceline_executor.runner.row_rules import NO_TOKENS
from paceline_executor.runner.rule_columns import Ruled
from paceline_executor.weights.hf.eagle3 import Eagle3Checkpoint
from paceline_executor.weights.hf.eagle3_config import eagle3_bytes_per_token
from paceline_kernels.attention import Splits
from paceline_kernels.compiler import jit
from paceline_kernels.sampling import SampleOutcome, sample

_NOWHERE = -1
_NEVER_DRAWN = np.float32(-1e30)  # finite, and far below what a logit and its noise can be


class _KeptFeatures:
    """The feature of the last position that was computed in each block, and of which position and token it is.

    A wrong one costs acceptance alone: blocks are given to others, who compute before they draft.
    """

    def __init__(self, num_blocks: int, hidden_size: int) -> None:
        self.features: Float32Array = np.zeros((num_blocks, hidden_size), dtype=np.float32)
        self.positions: Int32Array = np.full(num_blocks, _NOWHERE, dtype=np.int32)
        self.token_ids: Int32Array = np.full(num_blocks, _NOWHERE, dtype=np.int32)

    def put(self, blocks: Int32Array, positions: Int32Array, token_ids: Int32Array, features: Float32Array) -> None:
        self.features[blocks], self.positions[blocks], self.token_ids[blocks] = features, positions, token_ids

    def copy(self, sources: Int32Array, destinations: Int32Array) -> None:
        for column in (self.features, self.positions, self.token_ids):
            column[destinations] = column[sources]


@dataclass(slots=True)
class _Chain:
    """A row that is drafted for. What comes next is the feature of `position` and the token behind it."""

    row: WantingRow
    place: int  # among the wanting rows
    num_wanted: int
    feature: Float32Array  # [hidden]
    drafts: list[int]

    @property
    def position(self) -> int:
        return self.row.token_ids.size - 2 + len(self.drafts)

    @property
    def token_id(self) -> int:
        return self.drafts[-1] if self.drafts else int(self.row.token_ids[-1])

    @property
    def ruled(self) -> Ruled | None:
        row = self.row
        output = row.token_ids[row.num_prompt :]
        return None if row.rules is None else Ruled(row.rules, np.append(output, np.array(self.drafts, dtype=np.int32)))


class Eagle3Drafter:
    """See Drafter and StepObserver. A row has drafts when the target has computed all its tokens but the last."""

    def __init__(
        self,
        head: Eagle3Head,
        checkpoint: Eagle3Checkpoint,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        num_threads: int,
    ) -> None:
        """num_blocks, block_size: the target's. Raises StartError for too little memory."""
        config = checkpoint.config
        layer = config.layer
        bytes_per_block = block_size * eagle3_bytes_per_token(config, block_size)
        geometry = CacheGeometry(num_blocks, block_size, 1, layer.num_kv_heads, layer.head_dim, bytes_per_block)
        self._head = head
        self._aux_layers = config.aux_layers
        self._vocab_size = layer.vocab_size
        self._target_ids = checkpoint.target_ids
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._num_threads = num_threads
        self._kv_cache = allocate_kv_cache(geometry, KvDtype.FLOAT32).layer(0)
        self._kept = _KeptFeatures(num_blocks, layer.hidden_size)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._aux_layers

    def observe(self, batch: FlatBatch, states: Float32Array, num_valid: Int32Array) -> None:
        features: Float32Array = self._head.features(torch.from_numpy(states)).numpy()
        self._write(batch, features)
        self._keep(batch, features, num_valid)

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        for cache in (self._kv_cache.keys.numpy(), self._kv_cache.values.numpy()):
            cache[destinations] = cache[sources]
        self._kept.copy(sources, destinations)

    def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        jit.set_num_threads(self._num_threads)
        chains = [chain for place, row in enumerate(wanted.rows) if (chain := self._chain(place, row)) is not None]
        going = chains
        while going:
            going = self._draft_one_each(going, wanted.sampling)
        drafts = [NO_TOKENS] * len(wanted.rows)
        for chain in chains:
            drafts[chain.place] = np.array(chain.drafts, dtype=np.int32)
        return drafts

    def forget(self, row: int) -> None:
        """Blocks say what they hold, whoever's they are."""

    def _write(self, batch: FlatBatch, features: Float32Array) -> None:
        firsts = batch.cu_seqlens[:-1]
        before = np.maximum(batch.positions[firsts] - 1, 0)  # of each row's first token, if any; not in the batch
        blocks = batch.block_tables[np.arange(before.size), before // self._block_size]
        shifted = np.roll(features, 1, axis=0)
        shifted[firsts] = self._kept.features[blocks]
        is_known = np.ones(batch.token_ids.size, dtype=np.bool_)
        is_known[firsts] = (batch.positions[firsts] > 0) & (self._kept.positions[blocks] == before)
        positions = np.maximum(batch.positions - 1, 0)
        slots = slots_of(positions, batch.cu_seqlens, batch.block_tables, self._block_size)
        if is_known.any():
            self._head.write(
                torch.from_numpy(shifted[is_known]),
                torch.from_numpy(batch.token_ids[is_known]),
                torch.from_numpy(positions[is_known]),
                torch.from_numpy(slots[is_known]),
                self._kv_cache,
            )

    def _keep(self, batch: FlatBatch, features: Float32Array, num_valid: Int32Array) -> None:
        rows = np.repeat(np.arange(num_valid.size), np.diff(batch.cu_seqlens))
        last = batch.cu_seqlens[rows] + num_valid[rows] - 1
        places = np.arange(rows.size)
        is_kept = (places == last) | ((places < last) & (batch.positions % self._block_size == self._block_size - 1))
        positions = batch.positions[is_kept]
        blocks = batch.block_tables[rows[is_kept], positions // self._block_size]
        self._kept.put(blocks, positions, batch.token_ids[is_kept], features[is_kept])

    def _chain(self, place: int, row: WantingRow) -> _Chain | None:
        """None where the target has not computed what is needed, or no position is left."""
        position = row.token_ids.size - 2
        num_wanted = min(row.num_wanted, self._max_model_len - position)
        if position < 0 or num_wanted < 1:
            return None
        block, kept = int(row.block_ids[position // self._block_size]), self._kept
        if (kept.positions[block], kept.token_ids[block]) != (position, row.token_ids[position]):
            return None
        return _Chain(row, place, num_wanted, kept.features[block], [])

    def _draft_one_each(self, chains: list[_Chain], sampling: SamplingColumns) -> list[_Chain]:
        """One pass. Returns those that want more; of one that draws nothing that is all."""
        features = torch.from_numpy(np.stack([chain.feature for chain in chains]))
        found, hidden = self._head.forward(features, self._inputs(chains), self._kv_cache)
        columns = draws_behind(
            sampling,
            [chain.place for chain in chains],
            np.array([len(chain.drafts) for chain in chains], dtype=np.int32),
            [chain.ruled for chain in chains],
        )
        rules = None if columns.rules is None else logit_rules(columns.rules)
        logits = self._over_the_targets_ids(self._head.logits(hidden, Splits.EVEN))
        samples = sample(logits, sampling_parameters(columns), rules)
        drawn = zip(chains, found.numpy(), samples.token_ids.tolist(), samples.outcomes.tolist(), strict=True)
        going = []
        for chain, feature, token_id, outcome in drawn:
            if outcome == SampleOutcome.DRAWN:
                chain.feature = feature
                chain.drafts.append(token_id)
                if len(chain.drafts) < chain.num_wanted:
                    going.append(chain)
        return going

    def _inputs(self, chains: list[_Chain]) -> ForwardInputs:
        positions = np.array([chain.position for chain in chains], dtype=np.int32)
        tables = block_tables([chain.row for chain in chains], int(positions.max()) // self._block_size + 1)
        ends = np.arange(len(chains) + 1, dtype=np.int32)
        return ForwardInputs(
            token_ids=torch.tensor([chain.token_id for chain in chains], dtype=torch.int32),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots_of(positions, ends, tables, self._block_size)),
            cu_seqlens=torch.from_numpy(ends),
            context_lens=torch.from_numpy(positions + 1),
            block_tables=torch.from_numpy(tables),
            logit_tokens=torch.from_numpy(ends[:-1].copy()),
        )

    def _over_the_targets_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocabulary of the target]: noise is of its ids."""
        if self._target_ids is None:
            return logits
        spread = np.full((logits.shape[0], self._vocab_size), _NEVER_DRAWN, dtype=np.float32)
        spread[:, self._target_ids] = logits.numpy()
        return torch.from_numpy(spread)
