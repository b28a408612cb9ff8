"""Drafts from a smaller model: all rows of a step together, token after token, from a runner of its own.

Draws with the same noise differ about as often as the two distributions do (Daliri, Musco, Suresh, 2025,
https://arxiv.org/abs/2408.07978).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline_executor.runner.drafter import WantedDrafts, WantingRow, block_tables, draws_behind
from paceline_executor.runner.interface import FlatBatch, HostRunner, Int32Array, SamplingColumns
from paceline_executor.runner.row_rules import NO_TOKENS
from paceline_executor.runner.rule_columns import Ruled, within_vocabulary
from paceline_executor.speculation.block_contents import BlockContents

_MIN_CATCH_UP = 16  # tokens: they hardly take longer than one
_GAIN = 1 / 4


class CatchUpTime:
    """What it takes to compute what rows lack beside their last tokens: first as in some steps, `points` of tokens and
    nanoseconds, then as measured. A step computes `most` tokens of it, whatever time a scheduler says is spare.
    """

    def __init__(self, points: Sequence[tuple[int, int]], most: int) -> None:
        (least, least_ns), (longest, longest_ns) = min(points), max(points)
        self._most = most
        self._round_ns = float(least_ns)
        self._token_ns = max(1.0, (longest_ns - least_ns) / max(1, longest - least))

    def tokens_within(self, spare_ns: int) -> int:
        return min(self._most, max(_MIN_CATCH_UP, int(spare_ns / self._token_ns))) if spare_ns else 0

    def observe(self, num_lacking: int, took_ns: int) -> None:
        if not num_lacking:
            self._round_ns += _GAIN * (took_ns - self._round_ns)
        elif num_lacking >= _MIN_CATCH_UP // 2:
            self._token_ns += _GAIN * (max(1.0, (took_ns - self._round_ns) / num_lacking) - self._token_ns)


@dataclass(slots=True)
class _Chain:
    row: WantingRow
    place: int  # among the wanting rows
    token_ids: Int32Array  # [num_known + num_wanted], a copy
    num_tokens: int  # known or drafted
    num_held: int  # in the cache
    end: int  # what num_tokens comes to, with all drafts

    @property
    def drafts(self) -> Int32Array:
        return self.token_ids[self.row.token_ids.size : self.num_tokens]

    @property
    def wants_more(self) -> bool:
        return self.num_tokens < self.end

    @property
    def ruled(self) -> Ruled | None:
        rules = self.row.rules
        return None if rules is None else Ruled(rules, self.token_ids[self.row.num_prompt : self.num_tokens])


class DraftModel:
    """See Drafter. A row too far behind comes nearer with every step, and gets no drafts until then."""

    def __init__(
        self,
        runner: HostRunner,
        *,
        max_model_len: int,
        vocab_size: int,
        catch_up: CatchUpTime,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """runner: with the target's blocks. catch_up: of its tokens."""
        geometry = runner.kv_geometry
        self._runner = runner
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._catch_up = catch_up
        self._clock_ns = clock_ns
        self._contents = BlockContents(geometry.num_blocks, geometry.block_size, max_model_len)

    def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        chains = [chain for place, row in enumerate(wanted.rows) if (chain := self._chain(place, row)) is not None]
        going = chains = self._within_budget(chains, self._catch_up.tokens_within(wanted.spare_ns))
        starts = [chain.num_held for chain in chains]
        num_lacking = sum(chain.num_tokens - chain.num_held - 1 for chain in chains)
        while going:
            start_ns = self._clock_ns()
            self._compute(going, wanted.sampling)
            self._catch_up.observe(num_lacking, self._clock_ns() - start_ns)
            num_lacking, going = 0, [chain for chain in going if chain.wants_more]
        drafts = [NO_TOKENS] * len(wanted.rows)
        for chain, start in zip(chains, starts, strict=True):
            self._contents.put(chain.token_ids[: chain.num_held], start, chain.row.block_ids)
            drafts[chain.place] = chain.drafts
        return drafts

    def forget(self, row: int) -> None:
        """Blocks say what they hold."""

    def _chain(self, place: int, row: WantingRow) -> _Chain | None:
        """None where the row is too long for the model, or has a token that it does not know."""
        known = row.token_ids
        num_wanted = min(row.num_wanted, self._max_model_len + 1 - known.size)
        if num_wanted < 1 or known.max() >= self._vocab_size:
            return None
        # A draft is drawn from the last token's logits.
        num_held = min(self._contents.num_held(known, row.block_ids), known.size - 1)
        token_ids = np.concatenate((known, np.zeros(num_wanted, dtype=np.int32)))
        return _Chain(row, place, token_ids, known.size, num_held, token_ids.size)

    def _within_budget(self, chains: list[_Chain], num_spare: int) -> list[_Chain]:
        """The least behind first; the one after them comes nearer. `num_spare` tokens beside one for each row."""
        computed = []
        for chain in sorted(chains, key=lambda chain: chain.num_tokens - chain.num_held):
            lag = chain.num_tokens - chain.num_held - 1
            if lag > num_spare:
                chain.num_tokens = chain.end = chain.num_held + num_spare
            if chain.num_tokens > chain.num_held:
                computed.append(chain)
            num_spare -= min(lag, num_spare)
        return computed

    def _compute(self, chains: list[_Chain], sampling: SamplingColumns) -> None:
        """A chain that draws no draft is done."""
        output = self._runner.compute(self._batch(chains, sampling))
        drawn = iter(output.token_ids.tolist())
        counts = iter(output.num_accepted.tolist())
        for chain in chains:
            chain.num_held = chain.num_tokens
            if not chain.wants_more:
                continue
            if next(counts):
                chain.token_ids[chain.num_tokens] = next(drawn)
                chain.num_tokens += 1
            else:
                chain.end = chain.num_tokens

    def _batch(self, chains: list[_Chain], sampling: SamplingColumns) -> FlatBatch:
        block_size = self._runner.kv_geometry.block_size
        context_lens = np.array([chain.num_tokens for chain in chains], dtype=np.int32)
        starts = [chain.num_held for chain in chains]
        return FlatBatch(
            token_ids=np.concatenate([chain.token_ids[chain.num_held : chain.num_tokens] for chain in chains]),
            positions=np.concatenate([np.arange(chain.num_held, chain.num_tokens) for chain in chains], dtype=np.int32),
            cu_seqlens=np.concatenate(([0], np.cumsum(context_lens - starts)), dtype=np.int32),
            context_lens=context_lens,
            block_tables=block_tables([chain.row for chain in chains], -(-int(context_lens.max()) // block_size)),
            sampled=np.flatnonzero([chain.wants_more for chain in chains]).astype(np.int32),
            sampling=self._columns([chain for chain in chains if chain.wants_more], sampling),
        )

    def _columns(self, chains: list[_Chain], sampling: SamplingColumns) -> SamplingColumns:
        num_drafted = np.array([chain.drafts.size for chain in chains], dtype=np.int32)
        ruled = [chain.ruled for chain in chains]
        columns = draws_behind(sampling, [chain.place for chain in chains], num_drafted, ruled)
        if columns.rules is None:
            return columns
        return replace(columns, rules=within_vocabulary(columns.rules, self._vocab_size))
