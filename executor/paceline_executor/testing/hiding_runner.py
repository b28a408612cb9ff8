"""A runner that behaves as a device which computes on its own: nothing is known of a step until it is waited for.

Around any runner that computes in `launch`. What that one drew is kept back; whether a step is done is said late and at
random; and what a device keeps of rows is kept here. Tests that pass on it show that nobody reads what has not landed,
and that a device is told all it needs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import numpy as np

from paceline_executor.profiling.profiler import Profiler
from paceline_executor.runner.interface import (
    UNKNOWN_TOKEN,
    BoolArray,
    CacheGeometry,
    CarriedRows,
    Int32Array,
    LogitRuleColumns,
    PromptTargets,
    Runner,
    SamplingColumns,
    StepBatch,
    StepHandle,
    StepOutput,
    TokenLists,
)
from paceline_executor.runner.row_rules import RowRules
from paceline_executor.runner.rule_columns import Ruled, rule_columns

MAX_IN_FLIGHT = 4
_LATENESS = 0.7  # how often a step that could be told is said not to be done


@dataclass(eq=False)
class _Hidden:
    """It was computed and nobody may know."""

    output: StepOutput


@dataclass
class _KeptRow:
    """A device keeps this."""

    end_token_ids: Int32Array
    rules: RowRules | None
    output: list[int]  # where rules count tokens; else only as long
    blocks: dict[int, int]  # by their place in the table
    last_token: int = UNKNOWN_TOKEN
    has_ended: bool = False


class HidingRunner:
    """Several steps are in flight around a runner that has one.

    `lose_next` is raised by the next `wait`, as when a device fails while it computes.
    """

    def __init__(self, inner: Runner, seed: int = 0, max_in_flight: int = MAX_IN_FLIGHT) -> None:
        self._inner = inner
        self._random = Random(seed)  # noqa: S311, chance in tests is no secret
        self._max_in_flight = max_in_flight
        self._hidden: deque[_Hidden] = deque()
        self._rows: dict[int, _KeptRow] = {}
        self.lose_next: Exception | None = None
        self.deepest = 0  # how many steps were in flight at most

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def kv_geometry(self) -> CacheGeometry:
        return self._inner.kv_geometry

    @property
    def profiler(self) -> Profiler:
        return self._inner.profiler

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        return self._inner.warm_up()

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        """It runs in order with the steps."""
        self._inner.copy_blocks(sources, destinations)

    def launch(self, batch: StepBatch) -> StepHandle:
        if len(self._hidden) >= self._max_in_flight:
            raise AssertionError("more steps are launched than this device has room for")
        if batch.carried is None:
            raise AssertionError("a device with steps in flight has to know the rows of its batches")
        if batch.num_drafts is not None:
            raise AssertionError("this device finds no drafts: its limits must say 0")
        carried = batch.carried
        self._tell(carried)
        goes_on = np.array([not self._rows[row].has_ended for row in carried.rows.tolist()], dtype=np.bool_)
        kept = kept_rows(self._completed(batch, carried), goes_on)
        output = self._inner.wait(self._inner.launch(kept)) if goes_on.any() else _no_output()
        output = _spread(output, batch, goes_on)
        self._carry(batch, carried, output)
        self._hidden.append(_Hidden(output))
        self.deepest = max(self.deepest, len(self._hidden))
        return self._hidden[-1]

    def is_done(self, handle: StepHandle) -> bool:
        self._check_oldest(handle)
        return self._random.random() > _LATENESS

    def wait(self, handle: StepHandle) -> StepOutput:
        self._check_oldest(handle)
        hidden = self._hidden.popleft()
        if self.lose_next is not None:
            error, self.lose_next = self.lose_next, None
            raise error
        return hidden.output

    def _check_oldest(self, handle: StepHandle) -> None:
        if not self._hidden or handle is not self._hidden[0]:
            raise AssertionError("steps are waited for in the order of their launches")

    def _tell(self, carried: CarriedRows) -> None:
        described, cells = carried.described, carried.cells
        for index, row in enumerate(described.rows.tolist()):
            num_output = int(described.num_known[index] - described.num_prompt[index])
            output = described.history.list_of(index)[described.num_prompt[index] :].tolist() or [0] * num_output
            self._rows[row] = _KeptRow(described.end_token_ids[index], described.rules[index], output, {})
        for row, index, block_id in zip(cells.rows, cells.indices, cells.block_ids, strict=True):
            self._rows[int(row)].blocks[int(index)] = int(block_id)

    def _completed(self, batch: StepBatch, carried: CarriedRows) -> StepBatch:
        """With what only the device knows."""
        tables = np.full((carried.rows.size, self._table_width(carried)), -1, dtype=np.int32)
        for batch_row, row in enumerate(carried.rows.tolist()):
            for index, block_id in self._rows[row].blocks.items():
                tables[batch_row, index] = block_id
        ruled = [self._ruled(row) for row in carried.rows[batch.sampled].tolist()]
        sampling = replace(batch.sampling, rules=rule_columns(ruled))
        return replace(batch, token_ids=self._tokens(batch, carried), block_tables=tables, sampling=sampling)

    def _table_width(self, carried: CarriedRows) -> int:
        return max(1 + max(self._rows[row].blocks, default=-1) for row in carried.rows.tolist())

    def _ruled(self, row: int) -> Ruled | None:
        kept = self._rows[row]
        return None if kept.rules is None else Ruled(kept.rules, np.array(kept.output, dtype=np.int32))

    def _tokens(self, batch: StepBatch, carried: CarriedRows) -> Int32Array:
        """With those that only the device knows where rows go on."""
        token_ids = batch.token_ids.copy()
        for index in np.flatnonzero(token_ids == UNKNOWN_TOKEN).tolist():
            batch_row = int(np.searchsorted(batch.cu_seqlens, index, side="right")) - 1
            row = int(carried.rows[batch_row])
            kept = self._rows[row]
            if kept.last_token == UNKNOWN_TOKEN and not kept.has_ended:
                raise AssertionError(f"no step in flight can tell the last token of row {row}")
            token_ids[index] = kept.last_token
        return token_ids

    def _carry(self, batch: StepBatch, carried: CarriedRows, output: StepOutput) -> None:
        ends = np.cumsum(output.num_accepted)
        for index, batch_row in enumerate(batch.sampled.tolist()):
            kept = self._rows[int(carried.rows[batch_row])]
            drawn = output.token_ids[ends[index] - output.num_accepted[index] : ends[index]].tolist()
            if drawn:
                kept.output += drawn
                kept.last_token = drawn[-1]
                kept.has_ended = drawn[-1] in kept.end_token_ids
        for batch_row in output.problems:
            self._rows[int(carried.rows[batch_row])].has_ended = True


def kept_rows(batch: StepBatch, is_kept: BoolArray) -> StepBatch:
    if is_kept.all():
        return batch
    lens = np.diff(batch.cu_seqlens)
    number = np.cumsum(is_kept, dtype=np.int32) - 1  # of each kept row in what is left
    is_drawn = is_kept[batch.sampled]
    is_token_kept = np.repeat(is_kept, lens)
    return StepBatch(
        token_ids=batch.token_ids[is_token_kept],
        positions=batch.positions[is_token_kept],
        cu_seqlens=np.concatenate(([0], np.cumsum(lens[is_kept]))).astype(np.int32),
        context_lens=batch.context_lens[is_kept],
        block_tables=batch.block_tables[is_kept],
        sampled=number[batch.sampled[is_drawn]],
        sampling=_kept_sampling(batch.sampling, is_drawn),
        prompt_targets=_kept_targets(batch.prompt_targets, is_kept, number),
    )


def _kept_sampling(columns: SamplingColumns, is_kept: BoolArray) -> SamplingColumns:
    return replace(columns.of(is_kept), rules=None if columns.rules is None else _kept_rules(columns.rules, is_kept))


def _kept_rules(rules: LogitRuleColumns, is_kept: BoolArray) -> LogitRuleColumns:
    def lists(of_rows: TokenLists) -> TokenLists:
        lens = np.diff(of_rows.cu_lens)
        cu_lens = np.concatenate(([0], np.cumsum(lens[is_kept]))).astype(np.int32)
        return TokenLists(cu_lens, of_rows.token_ids[np.repeat(is_kept, lens)])

    columns = {column.name: getattr(rules, column.name) for column in fields(rules)}
    kept: dict[str, Any] = {
        name: lists(column) if isinstance(column, TokenLists) else column[is_kept]
        for name, column in columns.items()
        if name != "biases"
    }
    return LogitRuleColumns(**kept, biases=rules.biases[np.repeat(is_kept, np.diff(rules.biased.cu_lens))])


def _kept_targets(targets: PromptTargets | None, is_kept: BoolArray, number: Int32Array) -> PromptTargets | None:
    if targets is None or not is_kept[targets.rows].any():
        return None
    chosen = is_kept[targets.rows]
    token_ids = targets.token_ids[np.repeat(chosen, targets.num_tokens)]
    return PromptTargets(number[targets.rows[chosen]], targets.num_tokens[chosen], targets.num_top[chosen], token_ids)


def _spread(output: StepOutput, batch: StepBatch, was_kept: BoolArray) -> StepOutput:
    """Of the kept rows, as that of the whole batch."""
    if was_kept.all():
        return output
    batch_rows: Sequence[int] = np.flatnonzero(was_kept).tolist()
    num_accepted = np.zeros(batch.sampled.size, dtype=np.int32)
    num_accepted[was_kept[batch.sampled]] = output.num_accepted
    return replace(
        output,
        num_accepted=num_accepted,
        problems={batch_rows[row]: problem for row, problem in output.problems.items()},
        prompt_logprobs={batch_rows[row]: values for row, values in output.prompt_logprobs.items()},
    )


def _no_output() -> StepOutput:
    nothing = np.empty(0, dtype=np.int32)
    return StepOutput(num_accepted=nothing, token_ids=nothing, logprobs=None, problems={}, forward_ns=0, sample_ns=0)
