"""One attached executor: its rows, its blocks, the plans it has not answered.

`settle` and `commit` change it for a plan, `apply` (results.py) for a result. Blocks move when a plan is made, because
plan order is device order; rows become free, and preempted requests wait again, when the result confirms it.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.plan.hashes import HASH_START, grant_hash
from paceline.plan.values import (
    NO_GRANTS,
    NO_KEY,
    BatchPlan,
    BlockCopies,
    BlockGrants,
    BlockTags,
    FinalRelease,
    FinishReason,
    Int32Array,
    RecordId,
    Release,
)
from paceline_scheduler.core.executors import ExecutorDescription, History, Placement
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import HeldRow, LiveRequest, Status
from paceline_scheduler.core.phases import Phase
from paceline_scheduler.core.planning.capacity import ExecutorView
from paceline_scheduler.core.planning.growth import OutputLengths
from paceline_scheduler.core.planning.planner import Admission, Decision
from paceline_scheduler.core.planning.speculation import Speculation
from paceline_scheduler.core.planning.step_time import StepTimeModel
from paceline_scheduler.core.suspects import Suspects, UnansweredStep
from paceline_scheduler.core.tables.blocks import BlockPool
from paceline_scheduler.core.tables.rows import ENDING, LEAVING, RUNNING, RowColumns, RowIndex

MAX_PENDING_FORGETS = 4096

_Tag = tuple[int, bytes]  # a block and its key


@dataclass(frozen=True, slots=True)
class StepInFlight:
    step_id: int
    index: RowIndex
    num_scheduled_after: Int32Array  # [num_rows] positions planned up to and including this step, at most
    num_scheduled: Int32Array  # [num_rows] by this step alone
    num_drafts: Int32Array  # [num_rows] of these, or empty: nobody drafts
    released_rows: tuple[int, ...]
    num_preempted: int  # of these
    grant_hash: int
    num_tokens: int
    num_pairs: int
    predicted_ns: int

    def lowered(self, surplus: Int32Array) -> "StepInFlight":
        """Those positions were not computed before this step."""
        num_pairs = self.num_pairs - int((surplus * self.num_scheduled).sum())
        return replace(self, num_scheduled_after=self.num_scheduled_after - surplus, num_pairs=num_pairs)


@dataclass(slots=True, eq=False)
class NextPlan:
    ending_rows: list[int] = field(default_factory=list)  # in state ENDING
    rows_to_tag: list[int] = field(default_factory=list)  # prompt blocks filled since the last plan
    blocks_to_untag: list[int] = field(default_factory=list)  # that hold NaN or infinity
    forgets: deque[RecordId] = field(default_factory=lambda: deque(maxlen=MAX_PENDING_FORGETS))


@dataclass(slots=True, eq=False)
class _Planned:
    num_plans: int = 0
    num_settled: int = 0  # times at which something had ended, or was to be tagged
    num_turns: int = 0  # of rows
    full_tenants: set[str] = field(default_factory=set)  # whose requests the last plan passed over
    grant_hash: int = HASH_START


class ExecutorState:
    """The scheduler's cache of an executor's truth, from an accepted Attach to the end of that stream."""

    def __init__(self, description: ExecutorDescription) -> None:
        self.description = description
        self.rows = RowColumns(description.max_num_rows, description.max_model_len, description.max_num_draft_tokens)
        self.pool = BlockPool(description.num_blocks)
        self.step_time = StepTimeModel(description.step_points)
        self.output_lengths = OutputLengths()
        self.speculation = Speculation(description.max_num_rows, description.max_num_draft_tokens)
        self.in_flight: deque[StepInFlight] = deque()
        self.next_plan = NextPlan()
        self.leaving_keys: set[RecordId] = set()  # on orphaned rows: not placed again until they left
        self.suspects = Suspects[LiveRequest]()
        self.attached = True
        self.draining = False
        self.leaving = False  # it drains by itself: no operator can undo that
        self._ones: Int32Array = np.ones(description.max_num_rows, dtype=np.int32)
        self._ones.setflags(write=False)  # parts travel with plans
        self.planned = _Planned()

    @property
    def block_size(self) -> int:
        return self.description.block_size

    def view(self) -> ExecutorView:
        planned = self.planned
        return ExecutorView(
            self.description,
            self.rows,
            self.pool,
            self.step_time,
            self.output_lengths,
            self.speculation,
            self.leaving_keys,
            self.suspects.rows,
            self.suspects.is_doubted,
            (planned.num_plans, planned.num_settled, len(self.in_flight), len(self.next_plan.ending_rows)),
        )

    def takes_plan(self, limits: CoreLimits) -> bool:
        """Few plans are unanswered, or will soon be answered."""
        if len(self.in_flight) >= self.description.max_plans_in_flight:
            return False
        ahead_ns = sum(step.predicted_ns for step in self.in_flight)
        return len(self.in_flight) < limits.max_plans_in_flight or ahead_ns < limits.run_ahead_s * 1e9

    def inherit(self, before: "ExecutorState") -> None:
        """Takes over what was learned and what was not sent yet."""
        self.next_plan.forgets.extend(before.next_plan.forgets)
        self.output_lengths = before.output_lengths
        if before.description.incarnation == self.description.incarnation:
            self.step_time = before.step_time
            self.speculation.inherit(before.speculation)
            self.draining, self.leaving = before.draining, before.leaving
            self.suspects.inherit(before.suspects)

    def end_row(self, row: int, final: FinalRelease) -> None:
        self.rows.ended[row] = True
        live = self._live(row)
        live.final = final
        if self.rows.state[row] == RUNNING:
            self.rows.state[row] = ENDING
            self.next_plan.ending_rows.append(row)
            live.record.address = self.description.address
            if final.reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.output_lengths.observe(final.num_output_tokens)

    def deliver_to(self, row: int, handle: int, attempt: int) -> None:
        self.rows.handle[row], self.rows.attempt[row] = handle, attempt

    def distrust(self, row: int) -> None:
        """The numbers in its blocks are wrong: no request may begin behind them."""
        self.rows.num_computed[row] = 0
        self.next_plan.blocks_to_untag += self.pool.untag(self.rows.tables[row])

    def orphan(self, row: int) -> None:
        """The request goes on elsewhere, or from other output."""
        live = self._live(row)
        sync_from_row(self.rows, row, live)
        self.rows.live[row] = live.left_behind()
        self.rows.ended[row] = True
        self.leaving_keys.add(live.request.key)
        if self.rows.state[row] == RUNNING:
            self.rows.state[row] = ENDING
            self.next_plan.ending_rows.append(row)

    def rows_in_step(self) -> tuple[int, ...]:
        return tuple(self.in_flight[0].index.tolist()) if self.in_flight else ()

    def unanswered_steps(self) -> tuple[UnansweredStep[LiveRequest], ...]:
        """Oldest first, also of a lost executor."""
        return (*self.suspects.unanswered, *(self._unanswered(step) for step in self.in_flight))

    def _unanswered(self, step: StepInFlight) -> UnansweredStep[LiveRequest]:
        found = zip(step.index.tolist(), step.num_scheduled_after.tolist(), strict=True)
        positions = ((self.rows.live[row], position) for row, position in found)
        ours = tuple((live, position) for live, position in positions if live is not None and not live.is_orphan)
        return UnansweredStep(step.step_id, ours, is_lone=len(step.index) == 1)

    def settle(self) -> tuple[list[_Tag], list[Release]]:
        """The first half of a plan: tag filled blocks, then free what has ended."""
        due = self.next_plan
        if not (due.ending_rows or due.rows_to_tag or due.blocks_to_untag):
            return [], []
        self.next_plan = NextPlan(forgets=due.forgets)
        self.planned.num_settled += 1
        ending = sorted(due.ending_rows)
        tags = [(block, NO_KEY) for block in due.blocks_to_untag]
        tags += [tag for row in (*due.rows_to_tag, *ending) for tag in self._tag_filled(row)]
        return tags, [self._release(row, self._live(row).final) for row in ending]

    def commit(self, decision: Decision, tags: list[_Tag], releases: list[Release], now: float) -> BatchPlan:
        """The second half of a plan: carry out the decision and number it."""
        for row in decision.preemptions:
            self._live(row).preemptions.plan(self._preemption_sentence(decision))
            self._take_back(row, tags, releases, now)
        for row in decision.share_preemptions:
            self._live(row).preemptions.plan(
                f"its tenant's share of the blocks of {self.description.address} was taken, and a more urgent request"
                " of that tenant needed another one"
            )
            self._take_back(row, tags, releases, now)
        for row in decision.moves:
            self._live(row).preemptions.reason = f"{self.description.address} is being drained"
            self._take_back(row, tags, releases, now)
        placements, shared, placed, copies = self._place(decision.admissions, now)
        grown = self._grow(decision.growing_rows)
        grants = _join(placed, grown) if len(placed.rows) else grown
        index, counts, drafts = self._columns(decision)
        num_scheduled = self.rows.num_scheduled[index] + counts
        self.rows.num_scheduled[index] = num_scheduled
        self._count(index, grants, shared)
        plan = BatchPlan(
            incarnation=self.description.incarnation,
            epoch=self.description.epoch,
            step_id=self.planned.num_plans,
            rows=index.astype(np.int32),
            num_scheduled_tokens=counts,
            predicted_ns=decision.predicted_ns,
            tags=BlockTags.of(tags),
            releases=tuple(releases),
            new_requests=placements,
            copies=BlockCopies.of(copies),
            grants=grants,
            shared=shared,
            forget=tuple(self.next_plan.forgets),
            num_draft_tokens=drafts,
            min_draft_chance=decision.min_draft_chance,
            draft_spare_ns=decision.draft_spare_ns,
        )
        self.next_plan.forgets.clear()
        if self.speculation.max_drafts:
            self.speculation.planned(int(drafts.sum()))
        self._await_result(plan, decision, index, num_scheduled)
        return plan

    def _count(self, index: RowIndex, grants: BlockGrants, shared: BlockGrants) -> None:
        planned = self.planned
        self.rows.last_turn[index] = np.arange(planned.num_turns + 1, planned.num_turns + len(index) + 1)
        planned.num_plans += 1
        planned.num_turns += len(index)
        planned.grant_hash = grant_hash(grant_hash(planned.grant_hash, grants), shared)

    def _columns(self, decision: Decision) -> tuple[RowIndex, Int32Array, Int32Array]:
        """Returns rows, their numbers of tokens, and how many of these are drafts."""
        index, drafts = decision.decode_rows, decision.decode_drafts
        counts = 1 + drafts if len(drafts) else self._ones[: len(index)]
        if len(decision.chunk_rows):
            index = np.concatenate((index, decision.chunk_rows))
            counts = np.concatenate((counts, decision.chunk_tokens))
            if len(drafts):
                drafts = np.concatenate((drafts, np.zeros_like(decision.chunk_tokens)))
        return index, counts, drafts

    def _await_result(self, plan: BatchPlan, decision: Decision, index: RowIndex, num_scheduled: Int32Array) -> None:
        self.in_flight.append(
            StepInFlight(
                step_id=plan.step_id,
                index=index,
                num_scheduled_after=num_scheduled,
                num_scheduled=plan.num_scheduled_tokens,
                num_drafts=plan.num_draft_tokens,
                released_rows=tuple(release.row for release in plan.releases),
                num_preempted=len(decision.preemptions) + len(decision.share_preemptions),
                grant_hash=self.planned.grant_hash,
                num_tokens=decision.num_tokens,
                num_pairs=decision.num_pairs,
                predicted_ns=decision.predicted_ns,
            )
        )

    def _tag_filled(self, row: int) -> list[_Tag]:
        live = self._live(row)
        if live.request.bypass_prefix_cache or live.is_orphan:
            return []
        num_full = int(self.rows.num_computed[row]) // self.block_size
        chain, known = live.prefix_chain(self.description.tag_key, self.block_size), self.rows.token_ids(row)
        tags = []
        for index in range(int(self.rows.num_tagged_blocks[row]), num_full):
            block, key = self.rows.tables[row][index], chain.key(index, known)
            if self.pool.tag(block, key):
                tags.append((block, key))
        self.rows.set_tagged(row, num_full, self.block_size)
        return tags

    def _release(self, row: int, final: FinalRelease | None) -> Release:
        self.pool.release(self.rows.tables[row])
        self.rows.tables[row] = []
        self.rows.num_slots[row] = 0
        self.rows.state[row] = LEAVING
        return Release(row, final)

    def _take_back(self, row: int, tags: list[_Tag], releases: list[Release], now: float) -> None:
        live = self._live(row)
        live.status = Status.PREEMPTED
        live.phases.leave_row(now)
        tags += self._tag_filled(row)
        releases.append(self._release(row, None))

    def _preemption_sentence(self, decision: Decision) -> str:
        return (
            f"all {self.description.num_blocks} blocks of {self.description.address} were taken, and "
            f"{len(decision.growing_rows)} more urgent requests needed another one"
        )

    def _place(
        self, admissions: tuple[Admission, ...], now: float
    ) -> tuple[tuple[Placement, ...], BlockGrants, BlockGrants, list[tuple[int, int]]]:
        if not admissions:
            return (), NO_GRANTS, NO_GRANTS, []
        # All hits are taken first: no allocation may evict a block that is about to be hit.
        for admission in admissions:
            for block in admission.fit.hits:
                self.pool.share(block)
        placements = []
        copies = []
        shared: list[tuple[int, int, int]] = []
        granted: list[tuple[int, int, int]] = []
        for admission in admissions:
            row, hits, copied = admission.row, admission.fit.hits, admission.fit.copied_block
            fresh = self.pool.allocate(admission.fit.num_new_blocks)
            if copied is not None:
                copies.append((copied, fresh[0]))
            shared += [(row, index, block) for index, block in enumerate(hits)]
            granted += [(row, len(hits) + index, block) for index, block in enumerate(fresh)]
            placements.append(self._occupy(admission, [*hits, *fresh], now))
        return tuple(placements), _grants(shared), _grants(granted), copies

    def _occupy(self, admission: Admission, table: list[int], now: float) -> Placement:
        live, row = admission.live, admission.row
        num_cached = admission.fit.num_cached_tokens
        live.status, live.left = Status.RUNNING, None
        live.attempt += 1
        live.held = HeldRow(self.description.address, row)
        live.phases.enter(Phase.PREFILL, now)
        if live.num_prompt_cached_tokens is None:
            live.num_prompt_cached_tokens = num_cached
        max_tokens = admission.fit.max_tokens
        self.rows.occupy(row, live, live.known_token_ids(), num_cached, max_tokens)
        self.speculation.acceptance.begin(row)
        self.suspects.placed(row, live)
        self.rows.set_table(row, table, self.block_size, len(admission.fit.hits))
        history, output = _history(live, now), live.output.token_ids
        return Placement.of(live.request, history, row, live.attempt, output, max_tokens, num_cached)

    def _grow(self, rows: RowIndex) -> BlockGrants:
        """A row gets one block for each time it is named."""
        if not len(rows):
            return NO_GRANTS
        blocks, indices = self.pool.allocate(len(rows)), []
        for row, block in zip(rows.tolist(), blocks, strict=True):
            indices.append(len(self.rows.tables[row]))
            self.rows.tables[row].append(block)
        columns = BlockGrants(
            rows.astype(np.int32), np.array(indices, dtype=np.int32), np.array(blocks, dtype=np.int32)
        )
        self.rows.num_slots[rows] = (columns.indices + 1) * self.block_size  # the last one counts
        return columns

    def _live(self, row: int) -> LiveRequest:
        live = self.rows.live[row]
        assert live is not None, "an occupied row has a request"
        return live


def _history(live: LiveRequest, now: float) -> History:
    deadline_s = live.request.deadline_s
    return History(
        waited_s=max(0.0, now - live.phases.submitted_s),
        deadline_left_s=None if deadline_s is None else deadline_s - now,
        num_preemptions=live.preemptions.count,
        num_executor_deaths=live.suspicion.num_executor_deaths,
        last_death_offset=live.suspicion.last_death_offset,
        num_prompt_cached_tokens=live.num_prompt_cached_tokens or 0,
        times=live.phases.times(now),
        drafts=live.output.drafts,
    )


def sync_from_row(rows: RowColumns, row: int, live: LiveRequest) -> None:
    live.output.token_ids = rows.output_token_ids(row)
    live.output.rolling_hash = int(rows.output_hash[row])
    live.phases.token_s = None if np.isnan(rows.token_s[row]) else float(rows.token_s[row])
    live.output.drafts = rows.drafts(row)
    live.held = None
    live.preemptions.is_planned = False
    if live.final is not None:
        live.status = Status.FINISHED


def _grants(triples: list[tuple[int, int, int]]) -> BlockGrants:
    if not triples:
        return NO_GRANTS
    columns = np.array(triples, dtype=np.int32)
    return BlockGrants(*(np.ascontiguousarray(columns[:, i]) for i in range(3)))


def _join(first: BlockGrants, second: BlockGrants) -> BlockGrants:
    return BlockGrants(
        np.concatenate((first.rows, second.rows)),
        np.concatenate((first.indices, second.indices)),
        np.concatenate((first.block_ids, second.block_ids)),
    )
