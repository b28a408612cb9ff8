"""Rows in numpy, for runners that compute on their host: told by batches, advanced by what is drawn.

From what a batch names to what is computed: the rows' next tokens, drafts behind them, their blocks, sampling and
rules. They know their tokens before the rows that plans change do, so steps may be launched ahead. Refuses to know how
tokens are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline_executor.runner.interface import (
    UNKNOWN_TOKEN,
    BoolArray,
    CarriedRows,
    Int32Array,
    PromptTargets,
    RowDescriptions,
    SamplingColumns,
    StepBatch,
    StepOutput,
)
from paceline_executor.runner.row_rules import RowRules
from paceline_executor.runner.rule_columns import Ruled, rule_columns
from paceline_executor.speculation.drafter import TimedDrafter, WantedDrafts, WantingRow

Compute = Callable[[StepBatch], StepOutput]

_NOTHING = np.zeros(0, dtype=np.int32)
_NO_OUTPUT = StepOutput(
    num_accepted=_NOTHING, token_ids=_NOTHING, logprobs=None, problems={}, forward_ns=0, sample_ns=0
)


@dataclass(frozen=True, slots=True)
class _Step:
    """A batch that says all itself, of those rows that go on."""

    batch: StepBatch
    places: Int32Array  # [num_going] in the batch that was launched
    rows: Int32Array  # [num_going]
    num_draws: Int32Array  # [num_sampled]


class HostRows:
    """`step` tells, computes and advances. Memory grows with the rows that come."""

    def __init__(self, block_size: int, vocab_size: int, drafter: TimedDrafter) -> None:
        """vocab_size: a draft is below it."""
        self.drafter = drafter
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._num_prompt, self._num_known, self._num_computed = (_NOTHING for _ in range(3))
        self._has_ended: BoolArray = np.zeros(0, dtype=np.bool_)
        self._sampling = SamplingColumns.greedy(0)
        self._tokens, self._tables, self._end_tokens = (_NOTHING.reshape(0, 1) for _ in range(3))
        self._rules: dict[int, RowRules] = {}

    def step(self, batch: StepBatch, compute: Compute) -> StepOutput:
        """compute: is given a batch that says all itself, unless all rows have ended."""
        if batch.carried is None:
            return compute(batch)
        self._tell(batch, batch.carried)
        step = self._next_step(batch, batch.carried.rows)
        output = compute(step.batch) if step.rows.size else _NO_OUTPUT
        self._advance(step, output)
        return replace(_spread(step, output, batch), draft_ns=self.drafter.take_ns())

    def _tell(self, batch: StepBatch, carried: CarriedRows) -> None:
        described, cells = carried.described, carried.cells
        if described.rows.size:
            self._describe(described)
        token_rows, is_given = np.repeat(carried.rows, np.diff(batch.cu_seqlens)), batch.token_ids != UNKNOWN_TOKEN
        self._make_room(len(self._tokens), int(batch.context_lens.max(initial=0)))
        self._tokens[token_rows[is_given], batch.positions[is_given]] = batch.token_ids[is_given]
        if cells.rows.size:
            self._tables = _with_room(self._tables, len(self._tables), int(cells.indices.max()) + 1)
            self._tables[cells.rows, cells.indices] = cells.block_ids

    def _describe(self, described: RowDescriptions) -> None:
        rows, history = described.rows, described.history
        lens = np.diff(history.cu_lens)
        self._make_room(int(rows.max()) + 1, int(lens.max()))
        self._num_prompt[rows] = described.num_prompt
        self._num_known[rows] = described.num_known
        self._num_computed[rows] = described.num_computed
        self._has_ended[rows] = False
        width = described.end_token_ids.shape[1]
        self._end_tokens = _with_room(self._end_tokens, len(self._end_tokens), width)
        self._end_tokens[rows] = -1
        self._end_tokens[rows, :width] = described.end_token_ids
        for column in fields(SamplingColumns)[:-1]:
            getattr(self._sampling, column.name)[rows] = getattr(described.sampling, column.name)
        positions = np.arange(history.token_ids.size) - np.repeat(history.cu_lens[:-1], lens)
        self._tokens[np.repeat(rows, lens), positions] = history.token_ids
        for row, rules in zip(rows.tolist(), described.rules, strict=True):
            self._rules.pop(row, None)
            if rules is not None:
                self._rules[row] = rules
            self.drafter.forget(row)

    def _make_room(self, num_rows: int, num_tokens: int) -> None:
        if num_rows > self._num_known.size:
            num_rows = max(num_rows, 2 * self._num_known.size)
            for name in ("_num_prompt", "_num_known", "_num_computed", "_has_ended"):
                setattr(self, name, _longer(getattr(self, name), num_rows))
            names = [column.name for column in fields(SamplingColumns)[:-1]]
            columns: dict[str, Any] = {name: _longer(getattr(self._sampling, name), num_rows) for name in names}
            self._sampling = SamplingColumns(**columns)
            self._tables = _with_room(self._tables, num_rows, 1)
            self._end_tokens = _with_room(self._end_tokens, num_rows, 1)
        self._tokens = _with_room(self._tokens, num_rows, num_tokens)

    def _next_step(self, batch: StepBatch, rows: Int32Array) -> _Step:
        held = self._num_known[rows]
        if batch.num_drafts is not None:
            held[batch.sampled] += self._draft(batch, rows[batch.sampled], batch.num_drafts)
        left = np.minimum(np.diff(batch.cu_seqlens), held - self._num_computed[rows])
        places = np.flatnonzero(np.where(self._has_ended[rows], 0, left)).astype(np.int32)
        rows, num_tokens = rows[places], left[places]
        starts, known = self._num_computed[rows], self._num_known[rows]
        context_lens = starts + num_tokens
        cu_seqlens = np.zeros(rows.size + 1, dtype=np.int32)
        np.cumsum(num_tokens, out=cu_seqlens[1:])
        positions = np.arange(cu_seqlens[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens[:-1], num_tokens)
        num_draws = np.maximum(context_lens + 1 - known, 0)
        sampled = np.flatnonzero(num_draws).astype(np.int32)
        num_draws = num_draws[sampled]
        num_blocks = -(-int(context_lens.max(initial=0)) // self._block_size)
        flat = StepBatch(
            token_ids=self._tokens[np.repeat(rows, num_tokens), positions],
            positions=positions,
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            block_tables=self._tables[rows, :num_blocks],
            sampled=sampled,
            sampling=self._sampling_of(rows[sampled], num_draws),
            prompt_targets=_targets_of(batch.prompt_targets, places),
            num_drafts=None if batch.num_drafts is None else num_draws - 1,
        )
        return _Step(flat, places, rows, num_draws)

    def _sampling_of(self, rows: Int32Array, num_draws: Int32Array, *, with_rules: bool = True) -> SamplingColumns:
        """Of the draws behind the known tokens, and behind each draft."""
        of_row = np.repeat(rows, num_draws)
        num_before = np.arange(of_row.size, dtype=np.int32) - np.repeat(np.cumsum(num_draws) - num_draws, num_draws)
        num_output = (self._num_known - self._num_prompt)[of_row] + num_before.astype(np.int32)
        sampling = replace(self._sampling.of(of_row), offsets=num_output)
        if not (with_rules and self._rules):
            return sampling
        ruled = [self._ruled(*draw) for draw in zip(of_row.tolist(), num_output.tolist(), strict=True)]
        return replace(sampling, rules=rule_columns(ruled))

    def _ruled(self, row: int, num_output: int) -> Ruled | None:
        rules, num_prompt = self._rules.get(row), self._num_prompt[row]
        return None if rules is None else Ruled(rules, self._tokens[row, num_prompt : num_prompt + num_output])

    def _draft(self, batch: StepBatch, rows: Int32Array, num_wanted: Int32Array) -> Int32Array:
        """Writes drafts behind the known tokens; returns how many each row has."""
        num_drafts, wanting = np.zeros_like(num_wanted), np.flatnonzero((num_wanted > 0) & ~self._has_ended[rows])
        if not wanting.size:
            return num_drafts
        asked = zip(rows[wanting].tolist(), num_wanted[wanting].tolist(), strict=True)
        of_rows = [self._wanting(row, num) for row, num in asked]
        sampling = self._sampling_of(rows[wanting], np.ones(wanting.size, dtype=np.int32), with_rules=False)
        guesses = self.drafter.draft(WantedDrafts(of_rows, sampling, batch.min_draft_chance, batch.draft_spare_ns))
        for index, of_row, guessed in zip(wanting.tolist(), of_rows, guesses, strict=True):
            known = of_row.token_ids.size
            drafts = self._possible(guessed[: of_row.num_wanted], of_row.row)
            num_drafts[index] = drafts.size
            self._tokens[of_row.row, known : known + drafts.size] = drafts
        return num_drafts

    def _wanting(self, row: int, num_wanted: int) -> WantingRow:
        known = int(self._num_known[row])
        num_blocks = -(-(known + num_wanted) // self._block_size)
        return WantingRow(
            row,
            self._tokens[row, :known],
            num_wanted,
            self._tables[row, :num_blocks],
            int(self._num_prompt[row]),
            self._rules.get(row),
        )

    def _possible(self, drafts: Int32Array, row: int) -> Int32Array:
        """Before the first that ends the row or is no token: behind an end token a row takes none."""
        is_end = (drafts[:, None] == self._end_tokens[row]).any(axis=1)
        is_bad = (drafts < 0) | (drafts >= self._vocab_size) | is_end
        return drafts[: is_bad.argmax()] if is_bad.any() else drafts

    def _advance(self, step: _Step, output: StepOutput) -> None:
        sampled, num_accepted = step.rows[step.batch.sampled], output.num_accepted
        ends, num_known = np.cumsum(num_accepted), self._num_known[sampled]
        positions = np.arange(output.token_ids.size) + np.repeat(num_known - (ends - num_accepted), num_accepted)
        self._make_room(len(self._tokens), int(positions.max(initial=-1)) + 1)
        self._tokens[np.repeat(sampled, num_accepted), positions] = output.token_ids
        self._num_known[sampled] += num_accepted
        self._num_computed[step.rows] = step.batch.context_lens
        self._num_computed[sampled] -= step.num_draws - np.maximum(num_accepted, 1)
        has_tokens = num_accepted > 0
        drawing, last = sampled[has_tokens], output.token_ids[ends[has_tokens] - 1]
        self._has_ended[drawing] = (self._end_tokens[drawing] == last[:, None]).any(axis=1)
        self._has_ended[step.rows[list(output.problems)]] = True


def _spread(step: _Step, output: StepOutput, batch: StepBatch) -> StepOutput:
    """As that of the whole batch."""
    num_accepted, num_verified = np.zeros((2, batch.context_lens.size), dtype=np.int32)
    sampled = step.places[step.batch.sampled]
    num_accepted[sampled], num_verified[sampled] = output.num_accepted, step.num_draws - 1
    return replace(
        output,
        num_accepted=num_accepted[batch.sampled],
        problems={int(step.places[row]): problem for row, problem in output.problems.items()},
        prompt_logprobs={int(step.places[row]): values for row, values in output.prompt_logprobs.items()},
        num_verified=num_verified[batch.sampled],
    )


def _targets_of(targets: PromptTargets | None, places: Int32Array) -> PromptTargets | None:
    """places: of rows that go on, ascending."""
    if targets is None:
        return None
    goes_on = np.isin(targets.rows, places)
    token_ids = targets.token_ids[np.repeat(goes_on, targets.num_tokens)]
    rows = np.searchsorted(places, targets.rows[goes_on]).astype(np.int32)
    return PromptTargets(rows, targets.num_tokens[goes_on], targets.num_top[goes_on], token_ids) if rows.size else None


def _longer(column: npt.NDArray[np.generic], size: int) -> npt.NDArray[np.generic]:
    return np.concatenate((column, np.zeros(size - column.size, dtype=column.dtype)))


def _with_room(matrix: Int32Array, num_rows: int, width: int) -> Int32Array:
    """At least so large; twice as wide where it grows. What is new is -1."""
    if num_rows <= matrix.shape[0] and width <= matrix.shape[1]:
        return matrix
    wide = matrix.shape[1] if width <= matrix.shape[1] else max(width, 2 * matrix.shape[1])
    larger: Int32Array = np.full((max(num_rows, len(matrix)), wide), -1, dtype=np.int32)
    larger[: len(matrix), : matrix.shape[1]] = matrix
    return larger
