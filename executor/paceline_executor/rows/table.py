"""The one place where rows change: a plan is applied wholly or not at all, a step's output enters wholly or not at all.

Knows rows, records, block tables and tags. It refuses to know the device: `build_batch` makes what the runner is asked,
`finish_step` takes what it answered, and between the two `take_back` undoes a plan whose step failed.
"""

from dataclasses import dataclass

import numpy as np

from paceline.plan.hashes import HASH_START, grant_hash
from paceline.plan.values import (
    BatchPlan,
    BlockTags,
    NewRequest,
    RecordId,
    Release,
    RowError,
    RowFinish,
    RowState,
    StepResult,
)
from paceline_executor.errors import PlanError, PlanFault
from paceline_executor.rows import outcome
from paceline_executor.rows.batch import Prepared, prepare
from paceline_executor.rows.block_tables import BlockTables
from paceline_executor.rows.checks import check_form
from paceline_executor.rows.columns import GOES_ON, RowColumns
from paceline_executor.rows.limits import RowLimits
from paceline_executor.rows.logprobs import LogprobLog
from paceline_executor.rows.records import Records
from paceline_executor.rows.requests import bounded, fault_of
from paceline_executor.rows.rules import RowRules, rules_of
from paceline_executor.rows.tags import TagBoard
from paceline_executor.rows.undo import Undo
from paceline_executor.runner.interface import Int32Array, StepOutput


@dataclass(frozen=True, slots=True)
class Applied:
    """A plan that took effect: the way back, and the requests in it that cannot run."""

    undo: Undo
    errors: tuple[RowError, ...]


class RowTable:
    """All rows of an executor, with the records of requests that left them."""

    def __init__(self, limits: RowLimits) -> None:
        self.limits = limits
        self._columns = RowColumns(limits)
        self._placements: dict[int, NewRequest] = {}  # by row
        self._rows: dict[RecordId, int] = {}
        self._logprobs: dict[int, LogprobLog] = {}  # by row, of those that asked
        self._rules: dict[int, RowRules] = {}  # by row, of those that have any
        self._block_tables = BlockTables(self._columns, limits.num_blocks)
        self._tags = TagBoard(limits.num_blocks)
        self._records = Records(limits.max_record_bytes, limits.record_keep_ns)
        self._grant_hash = HASH_START

    @property
    def num_rows_in_use(self) -> int:
        """How many rows hold a request."""
        return len(self._placements)

    @property
    def num_granted_blocks(self) -> int:
        """How many blocks are in block tables."""
        return self._block_tables.num_granted

    @property
    def num_tagged_blocks(self) -> int:
        """How many blocks carry a prefix-cache key."""
        return self._tags.num_tagged

    @property
    def num_records(self) -> int:
        """How many released requests are remembered."""
        return len(self._records)

    def record_id_on(self, row: int) -> RecordId | None:
        """Which request is on a row, if any."""
        placement = self._placements.get(row)
        return None if placement is None else placement.record_id

    def begin_epoch(self) -> None:
        """A scheduler was accepted: its grants are hashed from the start."""
        self._grant_hash = HASH_START

    def clear_tags(self) -> None:
        """Forget all prefix-cache keys: they were made under another key than the scheduler's."""
        self._tags.clear_all()

    def trim_records(self, now_ns: int) -> None:
        """Drop records that are past their time or beyond the limit in bytes."""
        self._records.trim(now_ns)

    def apply(self, plan: BatchPlan, now_ns: int) -> Applied:
        """Make the plan's changes, in plan order.

        Raises PlanError or UnsupportedPlanError, and then nothing has changed.
        """
        check_form(plan, self.limits)
        undo = Undo()
        try:
            self._tags.put(plan.tags, undo)
            released = tuple(self._release(release, now_ns, undo) for release in plan.releases)
            for record_id in plan.forget:
                self._records.forget(record_id, undo)
            errors = tuple(filter(None, (self._place(placement, released, undo) for placement in plan.new_requests)))
            self._grant(plan, undo)
            self._check_schedule(plan)
        except Exception:
            undo.roll_back()
            raise
        return Applied(undo, errors)

    def build_batch(self, plan: BatchPlan) -> Prepared:
        """What the runner is asked to compute for an applied plan."""
        return prepare(self._columns, self._rules, plan)

    def finish_step(self, plan: BatchPlan, applied: Applied, prepared: Prepared, output: StepOutput) -> StepResult:
        """Let the rows of an executed step advance and say what came of it; where that fails, none has advanced."""
        drawn = outcome.draw(prepared, output)
        for drawn_logprobs in drawn.logprobs:
            self._logprobs[drawn_logprobs.row].check(drawn_logprobs.columns)
        progress = self._columns.progress(prepared.rows)
        lengths = [(self._logprobs[told.row], len(self._logprobs[told.row])) for told in drawn.logprobs]
        try:
            outcome.advance(self._columns, self.limits.max_model_len, prepared, drawn)
            for drawn_logprobs in drawn.logprobs:
                self._logprobs[drawn_logprobs.row].append(drawn_logprobs.columns)
            return outcome.report(self._columns, plan, applied.errors, drawn, self._grant_hash)
        except Exception:
            self._columns.go_back(prepared.rows, progress)
            for log, length in lengths:
                log.cut(length)
            raise

    def take_back(self, plan: BatchPlan, applied: Applied) -> None:
        """Undo an applied plan whose step failed.

        The step may have written to the blocks that the plan granted, so whoever held them before lost their contents.
        """
        applied.undo.roll_back()
        self._tags.clear(plan.grants.block_ids, Undo())
        self._block_tables.cut_before(plan.grants.block_ids)

    def states(self) -> tuple[RowState, ...]:
        """All rows in use, by index, then all records, oldest first."""
        return (*(self._state(row) for row in sorted(self._placements)), *self._records.states())

    def tags(self) -> BlockTags:
        """The prefix-cache keys of all blocks that carry one."""
        return self._tags.tags()

    def _release(self, release: Release, now_ns: int, undo: Undo) -> int:
        row = release.row
        state = self._released_state(release)
        self._block_tables.drop(row, undo)
        image, placement, logprobs = self._columns.image(row), self._placements[row], self._logprobs.get(row)
        rules = self._rules.get(row)

        def restore() -> None:
            self._columns.restore(row, image)
            self._occupy(placement)
            if logprobs is not None:
                self._logprobs[row] = logprobs
            if rules is not None:
                self._rules[row] = rules

        undo.add(restore)
        self._vacate(row)
        self._records.add(state, now_ns, undo)
        return row

    def _released_state(self, release: Release) -> RowState:
        row = release.row
        if not self._columns.in_use[row]:
            raise PlanError(PlanFault.ROW_NOT_IN_USE, f"row {row} is released but holds no request")
        state = self._state(row)
        num_output = state.output_token_ids.size
        if release.final is not None:
            if release.final.num_output_tokens > num_output:
                sentence = f"row {row} is released with {release.final.num_output_tokens} tokens and has {num_output}"
                raise PlanError(PlanFault.RELEASE_BEYOND_OUTPUT, sentence)
            num_output = release.final.num_output_tokens
        return RowState(
            record_id=state.record_id,
            row=None,
            attempt=state.attempt,
            prompt_token_ids=state.prompt_token_ids,
            output_token_ids=state.output_token_ids[:num_output].copy(),
            num_computed_tokens=0,
            block_ids=state.block_ids[:0],
            finish=state.finish,
            released=release.final,
            max_tokens=state.max_tokens,
            sampling=state.sampling,
            end_token_ids=state.end_token_ids,
            context=state.context,
            logprobs=None if state.logprobs is None else state.logprobs.up_to(num_output),
        )

    def _place(self, placement: NewRequest, released: tuple[int, ...], undo: Undo) -> RowError | None:
        row = placement.row
        self._check_place(placement, released)
        undo.add(lambda: self._vacate(row))
        self._occupy(placement)
        before = self._records.get(placement.record_id)
        self._records.forget(placement.record_id, undo)
        fault = fault_of(placement, self.limits)
        if fault is not None:
            self._placements[row] = bounded(placement)
            self._columns.place_failed(placement)
            return outcome.row_error(row, fault)
        num_known = placement.prompt_token_ids.size + placement.output_token_ids.size
        if placement.num_cached_tokens >= num_known:
            sentence = (
                f"row {row} has {num_known} tokens, {placement.num_cached_tokens} of them cached: none to compute"
            )
            raise PlanError(PlanFault.CACHED_TOKENS, sentence)
        self._columns.place(placement)
        rules = rules_of(placement)
        if rules is not None:
            self._rules[row] = rules
        if placement.num_logprobs is not None:
            num_top = min(placement.num_logprobs, self.limits.vocab_size)
            self._logprobs[row] = _log_of(placement, num_top, before)
        return None

    def _check_place(self, placement: NewRequest, released: tuple[int, ...]) -> None:
        row, record_id = placement.row, placement.record_id
        if self._columns.in_use[row]:
            raise PlanError(PlanFault.ROW_IN_USE, f"row {row} holds a request already")
        if row in released:
            sentence = f"row {row} is released in this plan; its result must confirm that before the row is used again"
            raise PlanError(PlanFault.ROW_IN_USE, sentence)
        if record_id in self._rows:
            sentence = f"request {record_id.request_id!r} is on row {self._rows[record_id]} already"
            raise PlanError(PlanFault.REQUEST_ALREADY_PLACED, sentence)

    def _occupy(self, placement: NewRequest) -> None:
        self._placements[placement.row] = placement
        self._rows[placement.record_id] = placement.row

    def _vacate(self, row: int) -> None:
        self._columns.clear(row)
        self._logprobs.pop(row, None)
        self._rules.pop(row, None)
        del self._rows[self._placements.pop(row).record_id]

    def _grant(self, plan: BatchPlan, undo: Undo) -> None:
        if not (plan.grants.rows.size or plan.shared.rows.size or plan.new_requests):
            return
        columns = self._columns
        for grants in (plan.grants, plan.shared):
            stray = grants.rows[~columns.in_use[grants.rows]]
            if stray.size:
                raise PlanError(PlanFault.ROW_NOT_IN_USE, f"row {stray[0]} is given blocks but holds no request")
        self._block_tables.put(plan.grants, plan.shared, plan.copies, undo)
        self._tags.clear(plan.grants.block_ids, undo)
        self._hash_grants(plan, undo)
        for placement in plan.new_requests:
            num_blocks = -(-placement.num_cached_tokens // self.limits.block_size)
            if columns.finish[placement.row] == GOES_ON and num_blocks > columns.num_blocks[placement.row]:
                sentence = f"row {placement.row} has cached tokens in blocks that it is not given"
                raise PlanError(PlanFault.BLOCK_MISSING, sentence)

    def _hash_grants(self, plan: BatchPlan, undo: Undo) -> None:
        before = self._grant_hash

        def restore() -> None:
            self._grant_hash = before

        undo.add(restore)
        self._grant_hash = grant_hash(grant_hash(before, plan.grants), plan.shared)

    def _check_schedule(self, plan: BatchPlan) -> None:
        columns, rows = self._columns, plan.rows
        if not rows.size:
            return
        self._require(rows, columns.in_use[rows], PlanFault.ROW_NOT_IN_USE, "is scheduled but holds no request")
        runs = columns.finish[rows] == GOES_ON
        rows, num_tokens = rows[runs], plan.num_scheduled_tokens[runs]
        num_computed = columns.num_computed[rows]
        end = num_computed.astype(np.int64) + num_tokens
        known, block_size = columns.num_known[rows], self.limits.block_size
        self._require(rows, end <= known, PlanFault.TOKENS_UNKNOWN, "is scheduled beyond its known tokens")
        has_blocks = end <= columns.num_blocks[rows].astype(np.int64) * block_size
        self._require(rows, has_blocks, PlanFault.BLOCK_MISSING, "is scheduled beyond its blocks")
        is_private = num_computed // block_size >= columns.num_shared[rows]
        self._require(rows, is_private, PlanFault.BLOCK_SHARED, "would write to a block it only shares")

    def _require(self, rows: Int32Array, holds: np.ndarray, fault: PlanFault, sentence: str) -> None:
        if not holds.all():
            raise PlanError(fault, f"row {rows[holds.argmin()]} {sentence}")

    def _state(self, row: int) -> RowState:
        columns, placement = self._columns, self._placements[row]
        output = columns.tokens[row, columns.num_prompt[row] : columns.num_known[row]].copy()
        is_failed_placement = columns.num_known[row] == 0
        logprobs = self._logprobs.get(row)
        return RowState(
            record_id=placement.record_id,
            row=row,
            attempt=placement.attempt,
            prompt_token_ids=placement.prompt_token_ids,
            output_token_ids=placement.output_token_ids if is_failed_placement else output,
            num_computed_tokens=int(columns.num_computed[row]),
            block_ids=self._block_tables.blocks_of(row),
            finish=RowFinish(int(columns.finish[row])),
            released=None,
            max_tokens=placement.max_tokens,
            sampling=placement.sampling,
            end_token_ids=placement.end_token_ids,
            context=placement.context,
            logprobs=None if logprobs is None else logprobs.columns(),
        )


def _log_of(placement: NewRequest, num_top: int, before: RowState | None) -> LogprobLog:
    """The log of a row that begins: with those of its output so far, if the record of the attempt before has them."""
    num_output = placement.output_token_ids.size
    if before is None or before.logprobs is None or before.logprobs.num_top != num_top:
        return LogprobLog(num_output, num_top)
    goes_on = np.array_equal(before.prompt_token_ids, placement.prompt_token_ids) and np.array_equal(
        before.output_token_ids[:num_output], placement.output_token_ids
    )
    return LogprobLog.going_on(before.logprobs.up_to(num_output)) if goes_on else LogprobLog(num_output, num_top)
