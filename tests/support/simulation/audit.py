"""What executors take on trust, checked beside them: rules of the plan protocol that only a mistaken scheduler breaks.

An executor refuses what would let it write over another request's tokens, and has no time for the rest. Here every plan
is judged when it arrives, by what its sender may have known then, and when it takes effect. What blocks hold is written
down again, from the plans and results that landed, and so are the tenants of tags. Looks inside a table, changes none.
"""

from collections import deque
from collections.abc import Callable, Set

import numpy as np

from paceline.plan.values import NO_KEY, BatchPlan, Int32Array, NewRequest, RecordId, StepResult
from paceline_executor.errors import ServiceError
from paceline_executor.limits import RowLimits
from paceline_executor.rows.forms import FormMasker
from paceline_executor.rows.table import Launched, RowTable
from paceline_executor.runner.interface import StepOutput
from simulation.device import SlotRunner, TimedRunner

_UNWRITTEN = -1

Violated = Callable[[BatchPlan, str], None]
"""Hears which rule a plan breaks, and where."""


class PlanAudit:
    """The rules, and what is known of blocks. `violated` hears of every plan that breaks one."""

    def __init__(self, limits: RowLimits, violated: Violated) -> None:
        self.violated = violated
        self._block_size = limits.block_size
        self._landed = np.full((limits.num_blocks, limits.block_size), _UNWRITTEN, dtype=np.int32)  # what blocks hold
        self._contents: dict[bytes, bytes] = {}  # what each key stood for so far
        self._tenants: dict[int, str] = {}  # of blocks that were tagged
        self._waiting: deque[BatchPlan] = deque()  # arrived and not launched
        self._block_tables: deque[Int32Array] = deque()  # of the rows of each launched step

    def begin_epoch(self) -> None:
        """What has not been launched will not be."""
        self._waiting.clear()

    def arrives(self, plan: BatchPlan, table: RowTable) -> None:
        """Check what must hold when a plan arrives: results that its sender has not got yet confirm nothing."""
        occupants = table._occupants._placements
        waiting = [place for other in self._waiting for place in other.new_requests]
        rows = {place.row for place in waiting} | occupants.keys()
        record_ids = {place.record_id for place in (*waiting, *occupants.values())}
        for place in plan.new_requests:
            self._require(place.row not in rows, plan, "row reuse before confirmation", _where(place))
            is_free = place.record_id not in record_ids
            self._require(is_free, plan, "placement of a request that has not left its row", _where(place))
        for block, key in plan.tags:
            filled = key == NO_KEY or self._is_full(block)
            self._require(filled, plan, "tag of a block before the result that filled it", f"block {block}")
        self._waiting.append(plan)

    def launches(self, plan: BatchPlan, table: RowTable) -> None:
        while self._waiting and self._waiting.popleft() is not plan:
            pass
        for place in plan.new_requests:
            self._check_place(place, plan, table)
        if plan.tags.block_ids.size:
            self._check_tags(plan, table)
        if plan.num_draft_tokens.any():
            self._check_drafts(plan, table)

    def launched(self, launched: Launched, table: RowTable) -> None:
        """Check what a plan made of the rows and their blocks."""
        plan, keys = launched.plan, table._tags._keys
        for error in launched.errors:
            self._require(False, plan, "a request that can run", f"row {error.row}: {error.message}")
        for block in plan.grants.block_ids.tolist():
            self._tenants.pop(block, None)
        for row, block in zip(plan.shared.rows.tolist(), plan.shared.block_ids.tolist(), strict=True):
            where, placement = f"block {block} to row {row}", table.placement_on(row)
            self._require(bool(keys[block].any()), plan, "share of a block without a tag", where)
            is_own = placement is not None and self._tenants.get(block) == placement.record_id.tenant
            self._require(is_own, plan, "share across tenants", where)
            self._require(self._is_full(block), plan, "share of an unfilled block", where)
        for place in plan.new_requests:
            self._check_cached(place, plan, table)
        batch = launched.prepared.batch
        block_tables = table._columns.block_table[launched.prepared.rows]
        self._block_tables.append(block_tables)
        spans = zip((batch.context_lens - batch.num_tokens).tolist(), batch.context_lens.tolist(), strict=True)
        cells = [(line, np.arange(*span) // self._block_size) for line, span in enumerate(spans)]
        written = np.array([block for line, indices in cells for block in block_tables[line, indices]], dtype=np.int32)
        is_tagged = keys[written].any()
        self._require(not is_tagged, plan, "write to a tagged block", f"one of {sorted(set(written.tolist()))}")

    def landed(self, launched: Launched, num_before: Int32Array, table: RowTable) -> None:
        """Write down what blocks hold now. `num_before`: tokens that each row of the step had computed."""
        plan, prepared, columns = launched.plan, launched.prepared, table._columns
        copied = self._landed[plan.copies.sources].copy()
        self._landed[plan.grants.block_ids] = _UNWRITTEN
        self._landed[plan.copies.destinations] = copied
        lines = zip(prepared.rows.tolist(), num_before.tolist(), self._block_tables.popleft(), strict=True)
        for row, start, block_table in lines:
            positions = np.arange(start, columns.num_computed[row])
            cells = block_table[positions // self._block_size], positions % self._block_size
            self._landed[cells] = columns.tokens[row, positions]

    def taken_back(self, plans: list[BatchPlan]) -> None:
        """Steps failed that may have written to the blocks they were granted: nobody knows what these hold."""
        self._block_tables.clear()
        for plan in plans:
            self._landed[plan.grants.block_ids] = _UNWRITTEN
            for block in plan.grants.block_ids.tolist():
                self._tenants.pop(block, None)

    def _check_place(self, place: NewRequest, plan: BatchPlan, table: RowTable) -> None:
        where = _where(place)
        record = None if place.record_id in plan.forget else table._records.get(place.record_id)
        if record is not None and record.released is None:
            self._require(place.attempt > record.attempt, plan, "an attempt is higher than the one before", where)
            known = record.output_token_ids
            same = np.array_equal(place.output_token_ids[: known.size], known)
            # It may have gone on elsewhere in between; straight from here to here it has just what it had.
            at_once = place.attempt > record.attempt + 1 or place.output_token_ids.size == known.size
            self._require(same and at_once, plan, "a request continues with the output it had", where)
        is_open = place.output_token_ids.size < place.max_tokens
        self._require(is_open, plan, "at least one token is left to generate", where)
        is_whole = place.num_prompt_logprobs is None or not place.num_cached_tokens
        self._require(is_whole, plan, "what has log-probabilities is computed", where)

    def _check_drafts(self, plan: BatchPlan, table: RowTable) -> None:
        """They take no prompt's turn. Whether a decoding row could run is known to its scheduler alone; that a row
        waited for its form, and computes the last of its prompt again, to executors first.
        """
        columns = table._columns
        (with_prompt,) = np.nonzero(columns.in_use & (columns.computed_bound < columns.num_prompt))
        with_form = {
            row for row in table._occupants.forms if columns.computed_bound[row] == columns.num_prompt[row] - 1
        }
        waiting = set(with_prompt.tolist()) - {release.row for release in plan.releases} - with_form
        self._require(not waiting, plan, "drafts while a prompt waits", f"rows {sorted(waiting)}")
        are_alone = not plan.new_requests and (plan.num_scheduled_tokens == 1 + plan.num_draft_tokens).all()
        self._require(bool(are_alone), plan, "drafts beside a prompt", f"step {plan.step_id}")
        is_short = plan.draft_spare_ns <= plan.predicted_ns
        self._require(is_short, plan, "drafters catch up within a step's time", f"step {plan.step_id}")

    def _check_tags(self, plan: BatchPlan, table: RowTable) -> None:
        owners = {
            block: place.record_id.tenant
            for row, place in table._occupants._placements.items()
            if table._columns.in_use[row]
            for block in table._block_tables.blocks_of(row).tolist()
        }
        for block, key in plan.tags:
            if key == NO_KEY or not 0 <= block < len(self._landed):
                self._tenants.pop(block, None)
                continue
            where, content = f"block {block}", self._landed[block].tobytes()
            self._require(self._is_full(block), plan, "tag of an unfilled block", where)
            self._require(block in owners, plan, "tag of a released block", where)
            same = self._contents.setdefault(key, content) == content
            self._require(same, plan, "one key for two contents", where)
            self._tenants[block] = owners.get(block, "")

    def _check_cached(self, place: NewRequest, plan: BatchPlan, table: RowTable) -> None:
        if place.num_cached_tokens:
            num, tokens = place.num_cached_tokens, np.concatenate((place.prompt_token_ids, place.output_token_ids))
            sources = dict(zip(plan.copies.destinations.tolist(), plan.copies.sources.tolist(), strict=True))
            blocks = [sources.get(block, block) for block in table._block_tables.blocks_of(place.row).tolist()]
            held = self._landed[blocks].reshape(-1)[:num]
            same = np.array_equal(held, tokens[:num])
            self._require(same, plan, "shared blocks hold the row's tokens", _where(place))

    def _is_full(self, block: int) -> bool:
        return not 0 <= block < len(self._landed) or _UNWRITTEN not in self._landed[block]

    def _require(self, holds: bool, plan: BatchPlan, rule: str, where: str) -> None:
        if not holds:
            self.violated(plan, f"{rule}: {where}")


class AuditedTable(RowTable):
    """Rows with an auditor beside them. `applied` hears of plans that take effect; steps with `failing` ones fail."""

    def __init__(
        self,
        limits: RowLimits,
        audit: PlanAudit,
        slots: SlotRunner,
        device: TimedRunner,
        applied: Callable[[BatchPlan], None],
        failing: Set[RecordId],
        forms: FormMasker | None = None,
    ) -> None:
        super().__init__(limits, forms)
        self.slots = slots
        self._audit = audit
        self._device = device
        self._applied = applied
        self._failing = failing

    def begin_epoch(self) -> None:
        self._audit.begin_epoch()
        super().begin_epoch()

    def launch(self, plan: BatchPlan, now_ns: int) -> Launched:
        """See RowTable. What a plan is granted holds nothing that it may read."""
        self._audit.launches(plan, self)
        before = self._fingerprint()
        try:
            launched = super().launch(plan, now_ns)
        except ServiceError as error:
            self._audit.violated(plan, str(error))
            if self._fingerprint() != before:
                raise RuntimeError("a plan was refused and has changed something") from error
            raise
        self._applied(plan)
        self._audit.launched(launched, self)
        self.slots.forget(np.setdiff1d(plan.grants.block_ids, plan.copies.sources))
        running = map(self.placement_on, launched.prepared.rows.tolist())
        self._device.fails_next = any(place is not None and place.record_id in self._failing for place in running)
        return launched

    def _fingerprint(self) -> tuple[bytes, ...]:
        """All that a refused plan must leave as it was."""
        columns = (*self._columns._state(), self._block_tables._num_holders, self._tags._keys)
        rows = sorted((row, repr(record_id)) for record_id, row in self._occupants._rows.items())
        names = repr((self._grant_hash, rows, sorted(self._occupants._placements)))
        return (names.encode(), *(column.tobytes() for column in columns))

    def land(self, launched: Launched, output: StepOutput) -> StepResult:
        num_before = self._columns.num_computed[launched.prepared.rows]
        result = super().land(launched, output)
        self._audit.landed(launched, num_before, self)
        return result

    def take_back(self) -> None:
        plans = [launched.plan for launched in self._in_flight]
        super().take_back()
        self._audit.taken_back(plans)


def _where(place: NewRequest) -> str:
    return f"row {place.row}, {place.record_id}"
