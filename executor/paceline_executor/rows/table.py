"""The one place where rows change: a plan is launched wholly or not at all, a step's output lands wholly or not at all.

Launching makes the changes that later plans build on: tags, placements, block tables, and bounds of what rows come to
if every step in flight brings all it may. A released row is closed to new work. Landing makes what is known when a step
has ended: tokens, finishes, records; a released row is free. Steps land in the order of their launches; `take_back`
undoes all that are in flight, last first, and none of what it puts back is touched by landings.

Refuses to know the device, which reads `Launched.prepared`.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from llguidance import LLMatcher

from paceline.plan.hashes import HASH_START, grant_hash
from paceline.plan.values import (
    BatchPlan,
    BlockTags,
    NewRequest,
    Release,
    RowError,
    RowState,
    StepResult,
)
from paceline_executor.errors import PlanError, PlanFault, ServiceError
from paceline_executor.limits import RowLimits
from paceline_executor.rows import outcome
from paceline_executor.rows.batch import Prepared, prepare
from paceline_executor.rows.block_tables import BlockTables
from paceline_executor.rows.bounds import check_schedule, raise_bounds
from paceline_executor.rows.checks import check_form
from paceline_executor.rows.columns import GOES_ON, RowArrays
from paceline_executor.rows.forms import FormMasker, MaskedRow, RowForm
from paceline_executor.rows.occupants import Occupants
from paceline_executor.rows.records import Records
from paceline_executor.rows.requests import bounded, fault_of
from paceline_executor.rows.tags import TagBoard
from paceline_executor.rows.undo import Undo
from paceline_executor.runner.interface import HostTokenLists, StepMasks, StepOutput
from paceline_executor.runner.row_rules import NO_TOKENS


@dataclass(frozen=True, slots=True)
class Launched:
    """The plan took effect as far as it can before its step has ended. What its masks tell is added."""

    plan: BatchPlan
    now_ns: int
    errors: tuple[RowError, ...]  # of its requests that cannot run
    prepared: Prepared
    grant_hash: int
    undo: Undo
    waiting: set[int] = field(default_factory=set)  # rows that draw nothing yet, for their forms
    idle: set[int] = field(default_factory=set)  # rows that waited before, and do nothing until they are described anew
    failed_forms: set[int] = field(default_factory=set)  # rows


class RowTable:
    """Includes the records of requests that left them."""

    def __init__(self, limits: RowLimits, forms: FormMasker | None = None) -> None:
        """forms: None where outputs cannot be held to one."""
        self.limits = limits
        self._forms = forms
        self._columns = RowArrays(limits)
        self._block_tables = BlockTables(self._columns, limits.num_blocks)
        self._occupants = Occupants(self._columns, self._block_tables, forms)
        self._tags = TagBoard(limits.num_blocks)
        self._records = Records(limits.max_record_bytes, limits.record_keep_ns)
        self._grant_hash = HASH_START
        self._in_flight: deque[Launched] = deque()  # launched, not landed, oldest first

    @property
    def num_rows_in_use(self) -> int:
        return len(self._occupants)

    @property
    def num_granted_blocks(self) -> int:
        return self._block_tables.num_granted

    @property
    def num_tagged_blocks(self) -> int:
        return self._tags.num_tagged

    @property
    def num_records(self) -> int:
        return len(self._records)

    def placement_on(self, row: int) -> NewRequest | None:
        return self._occupants.placement_on(row)

    def begin_epoch(self) -> None:
        self._grant_hash = HASH_START

    def begin_device(self) -> None:
        """The device has been told nothing yet."""
        self._columns.is_told[:] = False

    def clear_tags(self) -> None:
        self._tags.clear_all()

    def trim_records(self, now_ns: int) -> None:
        self._records.trim(now_ns)

    def can_launch(self, plan: BatchPlan) -> bool:
        """The plan needs nothing that only a landing can tell. Schedulers wait for results before they place a row or
        request again, or state an output's length.
        """
        if not self._in_flight:
            return True
        try:
            check_form(plan, self.limits)
        except ServiceError:
            return False
        return not self._waits(plan)

    def launch(self, plan: BatchPlan, now_ns: int) -> Launched:
        """Raises PlanError or UnsupportedPlanError, and then nothing has changed."""
        check_form(plan, self.limits)
        undo = Undo()
        try:
            self._tags.put(plan.tags, undo)
            for release in plan.releases:
                self._close(release, undo)
            errors = tuple(filter(None, (self._place(placement, plan, undo) for placement in plan.new_requests)))
            self._grant(plan, undo)
            places = check_schedule(plan, self._columns, self.limits)
            occupants = self._occupants
            prepared = prepare(self._columns, occupants.rules, occupants.forms, plan, places, self.limits)
            if self._forms is not None and prepared.batch.forced is not None:
                num_forced = prepared.batch.forced.token_ids.token_ids.size
                self._forms.meter.add("executor_forced_draft_tokens_total", num_forced)
            raise_bounds(self._columns, prepared, undo)
            self._columns.count_as_told(prepared.rows, undo)
        except Exception:
            undo.roll_back()
            raise
        launched = Launched(plan, now_ns, errors, prepared, self._grant_hash, undo)
        self._in_flight.append(launched)
        return launched

    def waiting_form(self, launched: Launched) -> Future[LLMatcher] | None:
        """What the masks of the oldest step in flight wait for, None once all can be filled."""
        forms = (form for _, form in _drawing_forms(launched, self._columns, self._occupants))
        return next((form.replayed for form in forms if not form.is_ready), None)

    def masks(self, launched: Launched, drafts: HostTokenLists | None) -> StepMasks:
        """What rows of the oldest step in flight may draw. drafts: of the rows that it samples. A row draws nothing
        whose form is not compiled yet.
        """
        if self._forms is None:
            raise ValueError("no outputs are held to forms here")
        rows = []
        drawing = launched.prepared.rows[launched.prepared.batch.sampled]
        for index, form in _drawing_forms(launched, self._columns, self._occupants):
            row, of_row = int(drawing[index]), NO_TOKENS if drafts is None else drafts.list_of(index)
            rows.append(MaskedRow(row, form, self._columns.output_of(row), of_row))
        filled = self._forms.fill(rows)
        launched.waiting.update(filled.waiting)
        launched.failed_forms.update(filled.failed)
        return filled.masks

    def land(self, launched: Launched, output: StepOutput) -> StepResult:
        """Lands the oldest step in flight. If this fails nothing has changed."""
        if launched is not self._in_flight[0]:
            raise ValueError(f"step {launched.plan.step_id} is not the oldest in flight")
        plan, prepared = launched.plan, launched.prepared
        output, undrawn = outcome.judged(prepared, output, launched.waiting | launched.idle, launched.failed_forms)
        logs = self._occupants.logprobs
        records = [self._occupants.record_of(release) for release in plan.releases]
        drawn = outcome.draw(self._columns, logs, prepared, output, undrawn)
        progress = self._columns.progress(prepared.rows)
        lengths = [(logs[told.row], len(logs[told.row])) for told in drawn.logprobs]
        try:
            outcome.advance(self._columns, self.limits.max_model_len, prepared, drawn)
            for told in drawn.logprobs:
                logs[told.row].append(told.columns)
            result = outcome.report(self._columns, plan, launched.errors, drawn, launched.grant_hash)
        except Exception:
            self._columns.restore(prepared.rows, progress)
            for log, length in lengths:
                log.cut(length)
            raise
        self._in_flight.popleft()
        outcome.settle(self._columns, prepared, drawn)
        self._columns.is_told[list(launched.waiting)] = False  # the device takes them for ended
        for later in self._in_flight:
            later.idle.update(launched.waiting)
        self._keep_records(launched, records)
        return result

    def take_back(self) -> None:
        """Undoes all steps in flight. They may have written to the blocks granted by their plans, whose former holders
        lose them.
        """
        granted = [launched.plan.grants.block_ids for launched in self._in_flight]
        while self._in_flight:
            self._in_flight.pop().undo.roll_back()
        for block_ids in granted:
            self._tags.clear(block_ids, Undo())
            self._block_tables.cut_before(block_ids)

    def states(self) -> tuple[RowState, ...]:
        return (*self._occupants.states(), *self._records.states())

    def tags(self) -> BlockTags:
        return self._tags.tags()

    def _waits(self, plan: BatchPlan) -> bool:
        columns = self._columns
        released = [release for release in plan.releases if columns.in_use[release.row]]
        in_flight = [launched.plan for launched in self._in_flight]
        rows = [release.row for release in (*released, *(release for step in in_flight for release in step.releases))]
        leaving = {self._occupants.id_on(row) for row in rows}
        leaving.update(record_id for step in in_flight for record_id in step.forget)
        if any(columns.is_closed[placed.row] or placed.record_id in leaving for placed in plan.new_requests):
            return True
        finals = [(release.row, release.final.num_output_tokens) for release in released if release.final is not None]
        return any(num_output > self._occupants.num_output(row, columns.num_known) for row, num_output in finals)

    def _close(self, release: Release, undo: Undo) -> None:
        """Its blocks may be granted again, and its request placed elsewhere."""
        row, columns = release.row, self._columns
        _check_release(release, columns, self._occupants)

        def reopen() -> None:
            columns.in_use[row], columns.is_closed[row] = True, False
            self._occupants.place_again(row)

        undo.add(reopen)
        columns.in_use[row], columns.is_closed[row] = False, True
        self._occupants.release(row)
        self._block_tables.drop(row, undo)

    def _keep_records(self, launched: Launched, records: list[RowState]) -> None:
        for release, record in zip(launched.plan.releases, records, strict=True):
            self._occupants.vacate(release.row)
            self._records.add(record, launched.now_ns)
        for record_id in launched.plan.forget:
            self._records.forget(record_id)
        for placement in launched.plan.new_requests:
            self._records.forget(placement.record_id)

    def _place(self, placement: NewRequest, plan: BatchPlan, undo: Undo) -> RowError | None:
        row = placement.row
        _check_place(placement, plan, self._columns, self._occupants)
        undo.add(lambda: self._occupants.remove(row))
        self._occupants.occupy(placement)
        fault = fault_of(placement, self.limits, has_forms=self._forms is not None)
        if fault is not None:
            self._occupants.occupy(bounded(placement))
            self._columns.place_failed(placement)
            return outcome.row_error(row, fault)
        num_known = placement.prompt_token_ids.size + placement.output_token_ids.size
        if placement.num_cached_tokens >= num_known:
            sentence = (
                f"row {row} has {num_known} tokens, {placement.num_cached_tokens} of them cached, so none is left"
            )
            raise PlanError(PlanFault.CACHED_TOKENS, sentence)
        self._columns.place(placement)
        num_top = None if placement.num_logprobs is None else min(placement.num_logprobs, self.limits.vocab_size)
        before = None if num_top is None else self._record_before(placement, plan)
        self._occupants.begin_state(placement, num_top, before)
        return None

    def _record_before(self, placement: NewRequest, plan: BatchPlan) -> RowState | None:
        """The former attempt's, as this plan leaves it."""
        if placement.record_id in plan.forget:
            return None
        for release in plan.releases:
            if self._occupants.id_on(release.row) == placement.record_id:
                return self._occupants.record_of(release)
        return self._records.get(placement.record_id)

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


def _drawing_forms(launched: Launched, columns: RowArrays, occupants: Occupants) -> Iterator[tuple[int, RowForm]]:
    """Of rows that go on, with their places among those that are sampled."""
    forms = occupants.forms
    for index, row in enumerate(launched.prepared.rows[launched.prepared.batch.sampled].tolist()):
        if row in forms and row not in launched.idle and columns.finish[row] == GOES_ON:
            yield index, forms[row]


def _check_place(placement: NewRequest, plan: BatchPlan, columns: RowArrays, occupants: Occupants) -> None:
    row, record_id = placement.row, placement.record_id
    if any(release.row == row for release in plan.releases):
        sentence = f"row {row} is released in this plan; its result must confirm that before the row is used again"
        raise PlanError(PlanFault.ROW_IN_USE, sentence)
    if columns.in_use[row] or columns.is_closed[row]:
        raise PlanError(PlanFault.ROW_IN_USE, f"row {row} holds a request already")
    other = occupants.row_of(record_id)
    if other is not None:
        sentence = f"request {record_id.request_id!r} is on row {other} already"
        raise PlanError(PlanFault.REQUEST_ALREADY_PLACED, sentence)


def _check_release(release: Release, columns: RowArrays, occupants: Occupants) -> None:
    row = release.row
    if not columns.in_use[row]:
        raise PlanError(PlanFault.ROW_NOT_IN_USE, f"row {row} is released but holds no request")
    num_output = occupants.num_output(row, columns.known_bound)
    if release.final is not None and release.final.num_output_tokens > num_output:
        sentence = f"row {row} is released with {release.final.num_output_tokens} tokens and has {num_output}"
        raise PlanError(PlanFault.RELEASE_BEYOND_OUTPUT, sentence)
