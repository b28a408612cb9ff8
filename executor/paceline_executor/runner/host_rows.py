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

from paceline_executor.runner.drafter import TimedDrafter
from paceline_executor.runner.interface import (
    NOTHING_SAMPLED,
    BlockCells,
    FlatBatch,
    ForcedDrafts,
    HostTokenLists,
    Int32Array,
    LogitRuleColumns,
    PromptTargets,
    RowDescriptions,
    SamplingColumns,
    StepBatch,
    StepMasks,
    StepOutput,
)
from paceline_executor.runner.row_rules import NO_TOKENS, RowRules
from paceline_executor.runner.rule_columns import Ruled, rule_columns

Compute = Callable[[FlatBatch], StepOutput]

_KEPT = [column.name for column in fields(SamplingColumns) if column.name not in ("offsets", "rules")]
_NO_OUTPUT = StepOutput(
    num_accepted=NO_TOKENS, token_ids=NO_TOKENS, logprobs=None, problems={}, forward_ns=0, sample_ns=0
)


@dataclass(frozen=True, slots=True)
class BegunStep:
    """Of the rows that have not ended."""

    launched: StepBatch
    batch: FlatBatch
    places: npt.NDArray[np.intp]  # [num_rows] in the batch that was launched
    rows: Int32Array  # [num_rows]
    num_draws: Int32Array  # [num_sampled]

    @property
    def drafts(self) -> HostTokenLists:
        """Of each sampled row of the batch that was launched."""
        batch, found = self.batch, [NO_TOKENS] * self.launched.rows.size
        for index, num_draws in zip(batch.sampled.tolist(), self.num_draws.tolist(), strict=True):
            stop = batch.cu_seqlens[index + 1]
            found[self.places[index]] = batch.token_ids[stop - num_draws + 1 : stop]
        return HostTokenLists.of([found[index] for index in self.launched.sampled.tolist()])


class HostRows:
    """Memory grows with the rows that come."""

    def __init__(self, block_size: int, vocab_size: int, drafter: TimedDrafter) -> None:
        """vocab_size: a draft is below it."""
        self.drafter = drafter
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._num_prompt, self._num_known, self._num_computed = NO_TOKENS, NO_TOKENS, NO_TOKENS
        self._sampling: dict[str, npt.NDArray[Any]] = {name: getattr(NOTHING_SAMPLED, name) for name in _KEPT}
        self._tokens, self._tables, self._end_tokens = (NO_TOKENS.reshape(0, 1) for _ in range(3))
        self._rules: dict[int, RowRules] = {}

    def step(self, batch: StepBatch, compute: Compute) -> StepOutput:
        """Takes in what the batch tells, computes and advances. Nothing is computed where all rows have ended."""
        return self.end(self.begin(batch), compute)

    def begin(self, batch: StepBatch) -> BegunStep:
        """Up to what is computed."""
        if batch.described.rows.size:
            self._describe(batch.described)
        if batch.cells.rows.size:
            self._fill(batch.cells)
        # Behind a context lies what is drawn there.
        self._tokens = _with_room(self._tokens, len(self._tokens), int(batch.context_lens.max(initial=0)) + 1)
        return self._next_step(batch)

    def end(self, step: BegunStep, compute: Compute, masks: StepMasks | None = None) -> StepOutput:
        batch = step.batch
        if masks is not None:
            drawing, _ = _draws(step.rows[batch.sampled], step.num_draws)
            before = masks.before_output(self._num_known.size)
            batch = replace(batch, masks=masks, mask_of_draw=before[drawing] + batch.sampling.offsets)
        output = compute(batch) if step.rows.size else _NO_OUTPUT
        self._advance(step, output)
        return self._output(step, output)

    def _describe(self, described: RowDescriptions) -> None:
        rows, known, end_tokens = described.rows, described.known, described.end_token_ids
        self._make_room(int(rows.max()) + 1)
        self._num_prompt[rows] = described.num_prompt
        self._num_known[rows] = lens = described.num_known
        self._num_computed[rows] = described.num_computed
        for name, column in self._sampling.items():
            column[rows] = getattr(described.sampling, name)
        self._end_tokens = _with_room(self._end_tokens, len(self._end_tokens), end_tokens.shape[1])
        self._end_tokens[rows] = -1
        self._end_tokens[rows, : end_tokens.shape[1]] = end_tokens
        self._tokens = _with_room(self._tokens, len(self._tokens), int(lens.max()))
        for index, row in enumerate(rows.tolist()):
            self._tokens[row, : lens[index]] = known.list_of(index)
            self._rules.pop(row, None)
            if (rules := described.rules[index]) is not None:
                self._rules[row] = rules

    def _fill(self, cells: BlockCells) -> None:
        self._tables = _with_room(self._tables, len(self._tables), int(cells.indices.max()) + 1)
        self._tables[cells.rows, cells.indices] = cells.block_ids

    def _make_room(self, num_rows: int) -> None:
        if num_rows <= self._num_known.size:
            return
        num_rows = max(num_rows, 2 * self._num_known.size)
        for name in ("_num_prompt", "_num_known", "_num_computed"):
            setattr(self, name, _longer(getattr(self, name), num_rows))
        self._sampling = {name: _longer(column, num_rows) for name, column in self._sampling.items()}
        for name in ("_tokens", "_tables", "_end_tokens"):
            setattr(self, name, _with_room(getattr(self, name), num_rows, 1))

    def _next_step(self, batch: StepBatch) -> BegunStep:
        held = self._num_known[batch.rows]
        if batch.num_drafts is not None:
            held[batch.sampled] += self._draft(batch, batch.rows[batch.sampled], batch.num_drafts)
        left = np.minimum(batch.num_tokens, held - self._num_computed[batch.rows])
        places = left.nonzero()[0]
        rows, num_tokens = batch.rows[places], left[places]
        starts = self._num_computed[rows]
        context_lens = starts + num_tokens
        cu_seqlens = np.zeros(rows.size + 1, dtype=np.int32)
        np.cumsum(num_tokens, out=cu_seqlens[1:])
        positions = np.arange(cu_seqlens[-1], dtype=np.int32) + (starts - cu_seqlens[:-1]).repeat(num_tokens)
        num_draws = np.maximum(context_lens + 1 - self._num_known[rows], 0)
        sampled = num_draws.nonzero()[0].astype(np.int32)
        num_draws = num_draws[sampled]
        num_blocks = -(-int(context_lens.max(initial=0)) // self._block_size)
        flat = FlatBatch(
            token_ids=self._tokens[rows.repeat(num_tokens), positions],
            positions=positions,
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            block_tables=self._tables[rows, :num_blocks],
            sampled=sampled,
            sampling=self._sampling_of(*_draws(rows[sampled], num_draws)),
            prompt_targets=_targets_of(batch.prompt_targets, places),
            num_drafts=None if batch.num_drafts is None else num_draws - 1,
        )
        return BegunStep(batch, flat, places, rows, num_draws)

    def _sampling_of(self, rows: Int32Array, num_before: Int32Array | int) -> SamplingColumns:
        """num_before: drafts of the row before each draw."""
        num_output = self._num_known[rows] - self._num_prompt[rows] + num_before
        rules = self._rules_of(rows.tolist(), num_output.tolist()) if self._rules else None
        columns = {name: column[rows] for name, column in self._sampling.items()}
        return SamplingColumns(**columns, offsets=num_output, rules=rules)

    def _rules_of(self, rows: list[int], num_output: list[int]) -> LogitRuleColumns | None:
        if self._rules.keys().isdisjoint(rows):
            return None
        return rule_columns([self._ruled(row, num) for row, num in zip(rows, num_output, strict=True)])

    def _ruled(self, row: int, num_output: int) -> Ruled | None:
        rules, num_prompt = self._rules.get(row), self._num_prompt[row]
        return None if rules is None else Ruled(rules, self._tokens[row, num_prompt : num_prompt + num_output])

    def _draft(self, batch: StepBatch, rows: Int32Array, num_wanted: Int32Array) -> Int32Array:
        """Writes drafts behind the known tokens; returns how many each row has."""
        goes_on = self._num_known[rows] > self._num_computed[rows]
        num_drafts, wanting = np.zeros_like(num_wanted), np.flatnonzero(goes_on & (num_wanted > 0))
        if not wanting.size:
            return num_drafts
        for index in wanting.tolist():
            row, wanted = int(rows[index]), int(num_wanted[index])
            known = int(self._num_known[row])
            guessed = self._forced(batch.forced, row, known)
            if not guessed.size:
                guessed = self.drafter.draft(self._tokens[row, :known], wanted, batch.min_draft_chance)
            drafts = self._possible(guessed[:wanted], row)
            num_drafts[index] = drafts.size
            self._tokens[row, known : known + drafts.size] = drafts
        return num_drafts

    def _forced(self, forced: ForcedDrafts | None, row: int, known: int) -> Int32Array:
        """As far as the row has gone on with them."""
        if forced is None:
            return NO_TOKENS
        for index in np.flatnonzero(forced.rows == row).tolist():
            tokens, start = forced.token_ids.list_of(index), int(forced.starts[index])
            if np.array_equal(tokens[: known - start], self._tokens[row, start:known]):
                return tokens[known - start :]
        return NO_TOKENS

    def _possible(self, drafts: Int32Array, row: int) -> Int32Array:
        """Before the first that ends the row or is no token: behind an end token a row takes none."""
        is_end = (drafts[:, None] == self._end_tokens[row]).any(axis=1)
        is_bad = (drafts < 0) | (drafts >= self._vocab_size) | is_end
        return drafts[: is_bad.argmax()] if is_bad.any() else drafts

    def _advance(self, step: BegunStep, output: StepOutput) -> None:
        sampled, num_accepted = step.rows[step.batch.sampled], output.num_accepted
        ends, num_known = num_accepted.cumsum(), self._num_known[sampled] + num_accepted
        positions = np.arange(output.token_ids.size) + (num_known - ends).repeat(num_accepted)
        self._tokens[sampled.repeat(num_accepted), positions] = output.token_ids
        self._num_known[sampled] = num_known
        self._num_computed[step.rows] = step.batch.context_lens
        self._num_computed[sampled] -= step.num_draws - np.maximum(num_accepted, 1)
        last = self._tokens[sampled, num_known - 1]  # of a row that drew none, it has a problem
        ended = sampled[(self._end_tokens[sampled] == last[:, None]).any(axis=1)]
        if output.problems:
            ended = np.append(ended, step.rows[list(output.problems)])
        self._num_computed[ended] = self._num_known[ended]  # nothing is left to compute

    def _output(self, step: BegunStep, output: StepOutput) -> StepOutput:
        """As that of the whole batch."""
        batch = step.launched
        sampled = step.places[step.batch.sampled]

        def of_batch(values: Int32Array) -> Int32Array:
            spread = np.zeros(batch.rows.size, dtype=np.int32)
            spread[sampled] = values
            return spread[batch.sampled]

        return replace(
            output,
            num_accepted=of_batch(output.num_accepted),
            problems={int(step.places[row]): problem for row, problem in output.problems.items()},
            prompt_logprobs={int(step.places[row]): values for row, values in output.prompt_logprobs.items()},
            num_verified=None if batch.num_drafts is None else of_batch(step.num_draws - 1),
            draft_ns=self.drafter.take_ns(),
        )


def _draws(rows: Int32Array, num_draws: Int32Array) -> tuple[Int32Array, Int32Array | int]:
    """Behind the known tokens of rows, and behind each draft: the rows, and how many drafts are before."""
    if num_draws.max(initial=1) == 1:
        return rows, 0
    first = num_draws.cumsum(dtype=np.int32) - num_draws
    return rows.repeat(num_draws), np.arange(num_draws.sum(), dtype=np.int32) - first.repeat(num_draws)


def _targets_of(targets: PromptTargets | None, places: npt.NDArray[np.intp]) -> PromptTargets | None:
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
