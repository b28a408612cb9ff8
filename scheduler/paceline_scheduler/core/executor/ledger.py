"""The rows and blocks of one executor: who holds which, and what its next plan has to say of them.

`settle` and `commit` change them for a plan, `apply_result` (results.py) for a result. Blocks move when a plan is made,
because plan order is device order; rows become free, and preempted requests wait again, when the result confirms it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.plan.hashes import HASH_START, grant_hash
from paceline.plan.values import (
    NO_COPIES,
    NO_GRANTS,
    NO_KEY,
    NO_TAGS,
    BatchPlan,
    BlockCopies,
    BlockGrants,
    BlockTags,
    FinalRelease,
    RecordId,
    Release,
)
from paceline_scheduler.core.executors import ExecutorDescription, History, Placement, SeenRow
from paceline_scheduler.core.live import HeldRow, LiveRequest, Status
from paceline_scheduler.core.phases import Phase
from paceline_scheduler.core.planning.capacity import BlockNeed
from paceline_scheduler.core.planning.planner import Admission, Decision
from paceline_scheduler.core.tables.blocks import BlockPool
from paceline_scheduler.core.tables.rows import ENDING, LEAVING, RUNNING, RowColumns, RowIndex

MAX_PENDING_FORGETS = 4096
_Grant = tuple[int, int, int]  # a row, an index of its table, and a block


@dataclass(slots=True, eq=False)
class NextPlan:
    ending_rows: list[int] = field(default_factory=list)  # in state ENDING
    rows_to_tag: list[int] = field(default_factory=list)  # prompt blocks filled since the last plan
    blocks_to_untag: list[int] = field(default_factory=list)  # that hold NaN or infinity
    forgets: deque[RecordId] = field(default_factory=lambda: deque(maxlen=MAX_PENDING_FORGETS))

    @property
    def is_due(self) -> bool:
        return bool(self.ending_rows or self.forgets)


class Ledger:
    def __init__(self, description: ExecutorDescription) -> None:
        self.rows = RowColumns(description)
        self.pool = BlockPool(description.num_blocks)
        self.next_plan = NextPlan()
        self.leaving_keys: set[RecordId] = set()  # on orphaned rows: not placed again until they left
        self.num_plans = 0
        self.num_settled = 0  # times at which something had ended, or was to be tagged
        self.grant_hash = HASH_START
        self._num_turns = 0  # of rows
        self._tags: list[tuple[int, bytes]] = []  # each a block and its key, between the halves of a plan
        self._releases: list[Release] = []
        self._description = description

    def adopt(self, row: int, live: LiveRequest, seen: SeenRow, max_tokens: int) -> None:
        """It is taken over as the executor has it. Call `pool.rebuild` after all of them."""
        known = np.concatenate((seen.prompt_token_ids, seen.output_token_ids))
        self.rows.occupy(row, live, known, seen.num_computed_tokens, max_tokens)
        table = seen.block_ids.tolist()
        self.pool.adopt(table)
        # All blocks are tagged anew; those with tags in the snapshot are passed over.
        self.rows.set_table(row, table, 0)
        # The newest token may lie beyond the table: it gets its block when it is decoded.
        self.rows.target[row] = min(len(known), len(table) * self.rows.block_size)
        if live.is_orphan:
            self.next_plan.ending_rows.append(row)
            self.leaving_keys.add(live.request.key)

    def deliver_to(self, row: int, handle: int, attempt: int) -> None:
        self.rows.handle[row], self.rows.attempt[row] = handle, attempt

    def end_row(self, row: int, final: FinalRelease) -> bool:
        """Returns whether it ran until now."""
        live = self.rows.live_on(row)
        live.final = final
        is_running = self._end(row)
        if is_running:
            live.record.address = self._description.address
        return is_running

    def orphan(self, row: int) -> None:
        """The request goes on elsewhere, or from other output."""
        live = self.rows.live_on(row)
        sync_from_row(self.rows, row, live)
        self.rows.live[row] = live.left_behind()
        self.leaving_keys.add(live.request.key)
        self._end(row)

    def _end(self, row: int) -> bool:
        self.rows.ended[row] = True
        if self.rows.state[row] != RUNNING:
            return False
        self.rows.state[row] = ENDING
        self.next_plan.ending_rows.append(row)
        return True

    def distrust(self, row: int) -> None:
        """The numbers in its blocks are wrong: no request may begin behind them."""
        self.rows.num_computed[row] = 0
        self.next_plan.blocks_to_untag += self.pool.untag(self.rows.tables[row])

    def vacate(self, row: int) -> LiveRequest:
        """Its release is confirmed."""
        live = self.rows.live_on(row)
        live.preemptions.confirm()
        sync_from_row(self.rows, row, live)
        self.leaving_keys.discard(live.request.key)
        self.rows.vacate(row)
        return live

    def settle(self) -> bool:
        """The first half of a plan: tag filled blocks, then free what has ended. Returns whether it has to be told."""
        due = self.next_plan
        if due.ending_rows or due.rows_to_tag or due.blocks_to_untag:
            self.next_plan = NextPlan(forgets=due.forgets)
            self.num_settled += 1
            ending = sorted(due.ending_rows)
            self._tags += [(block, NO_KEY) for block in due.blocks_to_untag]
            for row in (*due.rows_to_tag, *ending):
                self._tag_filled(row)
            for row in ending:
                self._release(row, self.rows.live_on(row).final)
        return bool(self._tags or self._releases or due.forgets)

    def commit(self, decision: Decision, now: float) -> BatchPlan:
        """The second half of a plan: carry out the decision and number it."""
        description, room, drafting, index = self._description, decision.room, decision.drafting, decision.rows
        for row in room.preemptions:
            self._take_back(row, now).preemptions.plan(
                f"all {description.num_blocks} blocks of {description.address} were taken, and "
                f"{len(room.growing_rows)} more urgent requests needed another one"
            )
        for row in room.share_preemptions:
            self._take_back(row, now).preemptions.plan(
                f"its tenant's share of the blocks of {description.address} was taken, and a more urgent request of "
                "that tenant needed another one"
            )
        for row in room.moves:
            self._take_back(row, now).preemptions.reason = f"{description.address} is being drained"
        placements, shared, granted, copies = self._place(decision.work.admissions, now)
        granted += self._grow(room.growing_rows)
        if len(drafting.growing_rows):
            granted += self._grow(drafting.growing_rows)
        grants = _grants(granted)
        self.rows.num_slots[grants.rows] = (grants.indices + 1) * self.rows.block_size  # a row's last one counts
        self.rows.num_scheduled[index] += decision.num_scheduled_tokens
        self.rows.last_turn[index] = np.arange(self._num_turns + 1, self._num_turns + len(index) + 1)
        self.num_plans += 1
        self._num_turns += len(index)
        self.grant_hash = grant_hash(grant_hash(self.grant_hash, grants), shared)
        plan = BatchPlan(
            incarnation=description.incarnation,
            epoch=description.epoch,
            step_id=self.num_plans,
            rows=index.astype(np.int32),
            num_scheduled_tokens=decision.num_scheduled_tokens,
            predicted_ns=room.budget.predicted_ns(),
            tags=BlockTags.of(self._tags) if self._tags else NO_TAGS,
            releases=tuple(self._releases),
            new_requests=placements,
            copies=copies,
            grants=grants,
            shared=shared,
            forget=tuple(self.next_plan.forgets),
            num_draft_tokens=decision.num_draft_tokens,
            min_draft_chance=drafting.min_chance,
            draft_spare_ns=drafting.spare_ns,
        )
        for said in (self._tags, self._releases, self.next_plan.forgets):
            said.clear()
        return plan

    def _tag_filled(self, row: int) -> None:
        live = self.rows.live_on(row)
        if live.request.bypass_prefix_cache or live.is_orphan:
            return
        block_size = self.rows.block_size
        num_full = int(self.rows.num_computed[row]) // block_size
        chain, known = live.prefix_chain(self._description.tag_key, block_size), self.rows.token_ids(row)
        for index in range(int(self.rows.num_tagged_blocks[row]), num_full):
            block, key = self.rows.tables[row][index], chain.key(index, known)
            if self.pool.tag(block, key):
                self._tags.append((block, key))
        self.rows.set_tagged(row, num_full)

    def _release(self, row: int, final: FinalRelease | None) -> None:
        self.pool.release(self.rows.tables[row])
        self.rows.tables[row] = []
        self.rows.num_slots[row] = 0
        self.rows.state[row] = LEAVING
        self._releases.append(Release(row, final))

    def _take_back(self, row: int, now: float) -> LiveRequest:
        live = self.rows.live_on(row)
        live.status = Status.PREEMPTED
        live.phases.leave_row(now)
        self._tag_filled(row)
        self._release(row, None)
        return live

    def _place(
        self, admissions: Sequence[Admission], now: float
    ) -> tuple[tuple[Placement, ...], BlockGrants, list[_Grant], BlockCopies]:
        if not admissions:
            return (), NO_GRANTS, [], NO_COPIES
        # All hits are taken first: no allocation may evict a block that is about to be hit.
        for admission in admissions:
            for block in admission.fit.blocks.hits:
                self.pool.share(block)
        placements, copies = list[Placement](), list[tuple[int, int]]()
        shared, granted = list[_Grant](), list[_Grant]()
        for admission in admissions:
            row, blocks = admission.fit.row, admission.fit.blocks
            table = [*blocks.hits, *self.pool.allocate(blocks.num_new)]
            num_hits = len(blocks.hits)
            if blocks.copied is not None:
                copies.append((blocks.copied, table[num_hits]))
            triples = [(row, index, block) for index, block in enumerate(table)]
            shared += triples[:num_hits]
            granted += triples[num_hits:]
            placements.append(self._occupy(admission.live, row, blocks, table, now))
        return tuple(placements), _grants(shared), granted, BlockCopies.of(copies)

    def _occupy(self, live: LiveRequest, row: int, blocks: BlockNeed, table: list[int], now: float) -> Placement:
        num_cached, max_tokens = blocks.num_cached_tokens, blocks.max_tokens
        live.status, live.left = Status.RUNNING, None
        live.attempt += 1
        live.held = HeldRow(self._description.address, row)
        live.phases.enter(Phase.PREFILL, now)
        if live.num_prompt_cached_tokens is None:
            live.num_prompt_cached_tokens = num_cached
        self.rows.occupy(row, live, live.known_token_ids(), num_cached, max_tokens)
        self.rows.set_table(row, table, len(blocks.hits))
        history, output = _history(live, now), live.output.token_ids
        return Placement.of(live.request, history, row, live.attempt, output, max_tokens, num_cached)

    def _grow(self, rows: RowIndex) -> list[_Grant]:
        """A row gets one block for each time it is named."""
        tables, grants = self.rows.tables, list[_Grant]()
        for row, block in zip(rows.tolist(), self.pool.allocate(len(rows)), strict=True):
            grants.append((row, len(tables[row]), block))
            tables[row].append(block)
        return grants


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


def _grants(triples: list[_Grant]) -> BlockGrants:
    return (
        BlockGrants(*(np.array(column, dtype=np.int32) for column in zip(*triples, strict=True)))
        if triples
        else NO_GRANTS
    )
