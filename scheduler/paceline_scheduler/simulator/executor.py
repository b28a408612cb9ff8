"""An executor without a model, without I/O and without a clock.

It applies plans in device order, checks every rule a plan must keep (a broken one raises PlanViolationError), and
generates tokens by `tokens.TokenRule` from what its KV slots hold. Plans arrive by `receive` and run one after another
by `run_next`; the plans in between are the ones in flight, so that what must wait for a confirmation is checked too.
There are no logits, so that penalties, biases, allowed tokens and bad words change nothing here; `min_tokens` does.
Drafts are whatever makes `tokens.AcceptanceRule` come true: accepted ones are the tokens that would come anyway.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat

import numpy as np

from paceline.plan.values import (
    BatchPlan,
    BlockGrants,
    FailedStep,
    NewRequest,
    RecordId,
    Release,
    RowError,
    RowFinish,
    RowLogprobs,
    StepResult,
    StepTimings,
)
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.simulator.blocks import POISON, SimulatedBlocks
from paceline_scheduler.simulator.config import SimulatorConfig
from paceline_scheduler.simulator.failures import Blame, SimulatedDeviceError, SimulatedStepError
from paceline_scheduler.simulator.receiving import PlanInbox
from paceline_scheduler.simulator.rows import SimulatedRecord, SimulatedRow, columns_of
from paceline_scheduler.simulator.violations import PlanViolationError, require

GRANT_HASH_START = 0xCBF29CE484222325
_INTERNAL = 13  # of google.rpc.Code
_FNV_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1


def fold_grant_hash(value: int, row: int, index: int, block: int) -> int:
    """Return the grant hash after one more grant; the rule is that of paceline.v1.StepResult.grant_hash."""
    word = ((row << 48) + (index << 32) + block) & _MASK
    value = ((value ^ word) * _FNV_PRIME) & _MASK
    return value ^ (value >> 32)


class SimulatedExecutor:
    """One executor. `incarnation` stands for the process: `restart` makes another one of it that knows nothing."""

    def __init__(self, config: SimulatorConfig, incarnation: int = 1) -> None:
        self.config = config
        self.incarnation = incarnation
        self.epoch = 0
        self.num_steps = 0
        self._failed_step: FailedStep | None = None
        self.failing: set[RecordId] = set()  # steps that would run one of these fail
        self._forget_everything()

    def restart(self) -> None:
        """Die and come back: another incarnation without rows, records, blocks or tags."""
        self.incarnation += 1
        self.epoch = 0
        self._forget_everything()

    def attach(self, address: str) -> tuple[ExecutorDescription, Snapshot]:
        """Accept a scheduler: another epoch, plans that did not run are dropped, and the state at this boundary."""
        self.epoch += 1
        self._inbox = PlanInbox(self.config, self.incarnation, self.epoch)
        self._grant_hash = GRANT_HASH_START
        description = ExecutorDescription(
            address=address,
            incarnation=self.incarnation,
            epoch=self.epoch,
            model=self.config.model,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            max_num_rows=self.config.max_num_rows,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.config.max_model_len,
            max_plans_in_flight=self.config.max_plans_in_flight,
            tag_key=self.config.tag_key,
            vocab_size=self.config.tokens.vocab_size,
            step_points=self.config.step_points,
            failed_step=self._failed_step,
        )
        return description, self.snapshot()

    def snapshot(self) -> Snapshot:
        """Return rows, records and tags as they are now."""
        rows = [row.snapshot() for _, row in sorted(self.rows.items())]
        records = [record.snapshot() for record in self.records.values()]
        return Snapshot(rows=(*rows, *records), tags=self.blocks.tags())

    def execute(self, plan: BatchPlan) -> StepResult:
        """Receive a plan and run it at once."""
        self.receive(plan)
        assert self.num_plans_waiting == 1, "execute() is for plans that run as they arrive; else receive() and run"
        return self.run_next()

    @property
    def num_plans_waiting(self) -> int:
        """How many plans arrived and have not run."""
        return len(self._inbox.waiting)

    def receive(self, plan: BatchPlan) -> None:
        """Take a plan in, checking everything that must hold when it arrives."""
        self._inbox.receive(plan, self.rows, self.blocks)

    @property
    def next_plan(self) -> BatchPlan:
        """The oldest waiting plan, which runs next."""
        return self._inbox.waiting[0]

    def drop_waiting(self, num_launched: int = 0) -> None:
        """Forget the plans that have not run, wholly, but for the oldest ones that are being run."""
        while len(self._inbox.waiting) > num_launched:
            self._inbox.waiting.pop()

    def next_step_ns(self) -> int:
        """Return how long the next plan will take."""
        return self.config.step_ns(self.next_plan.num_tokens)

    def run_next(self) -> StepResult:
        """Run the oldest waiting plan. Raises SimulatedStepError when it fails: then those behind it are dropped.

        SimulatedDeviceError, which is one, says that the process has to end, and `restart` to follow.
        """
        plan = self._inbox.waiting.popleft()
        self._check_failing(plan)
        self.num_steps += 1
        self._change_state(plan)
        if len(plan.rows):
            self._blame.is_nobodys()
        return self._forward(plan)

    def fail_row(self, key: RecordId, reason: str, message: str) -> None:
        """Let a request fail alone the next time it runs."""
        self._row_errors[key] = RowError(0, _INTERNAL, reason, message)

    def _check_failing(self, plan: BatchPlan) -> None:
        placed = {placement.row: placement.record_id for placement in plan.new_requests}
        running = {index: row.key for index, row in self.rows.items() if row.finish is RowFinish.GOES_ON} | placed
        keys = [running[index] for index in plan.rows.tolist() if index in running]
        if self.failing.isdisjoint(keys):
            return
        self.drop_waiting()
        for block in plan.grants.block_ids.tolist():
            self._spoil(block)
        self._failed_step = FailedStep(self.epoch, plan.step_id, "a step failed on the simulated executor")
        is_ours = len(plan.rows) == 1 and self._blame.is_executors(keys)
        raise (SimulatedDeviceError if is_ours else SimulatedStepError)(self._failed_step)

    def _spoil(self, block: int) -> None:
        """A step that failed may have written to the blocks it was granted: who had one before has lost it."""
        self.blocks.spoil(block)
        for row in self.rows.values():
            if block in row.table.block_ids:
                num_left = row.table.block_ids.index(block)
                self.blocks.cut(row.table, num_left)
                row.num_computed_tokens = min(row.num_computed_tokens, num_left * self.config.block_size)

    def _forget_everything(self) -> None:
        self.rows: dict[int, SimulatedRow] = {}
        self.records: dict[RecordId, SimulatedRecord] = {}
        self.blocks = SimulatedBlocks(self.config.num_blocks, self.config.block_size)
        self._inbox = PlanInbox(self.config, self.incarnation, self.epoch)
        self._grant_hash = GRANT_HASH_START
        self._row_errors: dict[RecordId, RowError] = {}
        self._failed_step = None
        self._blame = Blame()

    def _change_state(self, plan: BatchPlan) -> None:
        owners = {block: row.key.tenant for row in self.rows.values() for block in row.table.block_ids}
        for block, key in plan.tags:
            self.blocks.tag(block, key, owners.get(block))
        for release in plan.releases:
            self._release(release)
        for record_id in plan.forget:
            self.records.pop(record_id, None)
        for placement in plan.new_requests:
            self._place(placement)
        # Shared blocks stand at the beginning of a table, so they go in first; the hash has its own order.
        for row, index, block in _triples(plan.shared):
            self.blocks.share(self._row(row).table, index, block)
        copied = [self.blocks.slots[source].copy() for source, _ in plan.copies]  # copies come before grants
        for row, index, block in _triples(plan.grants):
            self.blocks.grant(self._row(row).table, index, block)
        granted = set(plan.grants.block_ids.tolist())
        for (_, destination), contents in zip(plan.copies, copied, strict=True):
            require(destination in granted, "a copy goes to a block granted in the same plan", f"to {destination}")
            self.blocks.slots[destination] = contents
        for triple in (*_triples(plan.grants), *_triples(plan.shared)):
            self._grant_hash = fold_grant_hash(self._grant_hash, *triple)
        for placement in plan.new_requests:
            self._check_cached(placement)

    def _release(self, release: Release) -> None:
        row = self._row(release.row)
        if release.final is not None:
            kept = release.final.num_output_tokens
            require(0 <= kept <= row.num_output_tokens, "a record is only cut", f"row {release.row} to {kept} tokens")
        self.blocks.release(row.table)
        self.records[row.key] = row.record(release.final)
        del self.rows[release.row]

    def _place(self, placement: NewRequest) -> None:
        where = f"row {placement.row}, {placement.record_id}"
        require(placement.row not in self.rows, "placement on a row in use", where)
        is_elsewhere = any(row.key == placement.record_id for row in self.rows.values())
        require(not is_elsewhere, "a request is on one row", where)
        record = self.records.pop(placement.record_id, None)
        if record is not None and record.released is None:
            require(placement.attempt > record.attempt, "an attempt is higher than the one before", where)
            known = record.output_token_ids
            same = np.array_equal(placement.output_token_ids[: len(known)], known)
            # It may have gone on elsewhere in between; straight from here to here it has just what it had.
            at_once = placement.attempt > record.attempt + 1 or len(placement.output_token_ids) == len(known)
            require(same and at_once, "a request continues with the output it had", where)
        row = SimulatedRow(placement, self.config.max_model_len)
        require(placement.num_cached_tokens < row.num_tokens, "at least one token is left to compute", where)
        require(row.num_output_tokens < placement.max_tokens, "at least one token is left to generate", where)
        is_whole = placement.num_prompt_logprobs is None or not placement.num_cached_tokens
        require(is_whole, "what has log-probabilities is computed", where)
        self.rows[placement.row] = row

    def _check_cached(self, placement: NewRequest) -> None:
        row = self.rows[placement.row]
        num_cached = placement.num_cached_tokens
        if num_cached:
            read = self.blocks.read(row.table, num_cached)
            same = np.array_equal(read, row.token_ids[:num_cached])
            require(same, "shared blocks hold the row's tokens", f"row {placement.row}, {row.key}")

    def _forward(self, plan: BatchPlan) -> StepResult:
        accepted: list[int] = []
        tokens: list[int] = []
        finishes: list[int] = []
        logprobs: list[RowLogprobs] = []
        errors: list[RowError] = []
        prompt_logprobs: list[RowLogprobs] = []
        num_drafts = plan.num_draft_tokens.copy()
        columns = plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), num_drafts.tolist() or repeat(0)
        for place, (index, num_scheduled, num_drafted) in enumerate(zip(*columns, strict=False)):
            row = self._row(index)
            error = self._row_errors.pop(row.key, None) if row.finish is RowFinish.GOES_ON else None
            if error is not None:
                row.finish = RowFinish.ERROR
                errors.append(replace(error, row=index))
            start = row.num_computed_tokens
            drawn = self._advance(row, num_scheduled, num_drafted)
            if num_drafted and not drawn:
                num_drafts[place] = 0
            if row.finish is not RowFinish.ERROR and (told := row.prompt_logprobs(start, self.config.tokens)):
                prompt_logprobs.append(RowLogprobs(index, row.token_ids[told.offset : told.end].copy(), told))
            accepted.append(len(drawn))
            finishes.append(row.finish)
            tokens += drawn
            if drawn and (num_logprobs := row.placement.num_logprobs) is not None:
                offsets = range(row.num_output_tokens - len(drawn), row.num_output_tokens)
                told_of = zip(drawn, offsets, strict=True)
                fresh = [self.config.tokens.logprobs(*token, num_logprobs) for token in told_of]
                row.logprobs += fresh
                token_ids = np.array(drawn, dtype=np.int32)
                logprobs.append(RowLogprobs(index, token_ids, columns_of(0, fresh, num_logprobs)))
        return StepResult(
            incarnation=self.incarnation,
            epoch=self.epoch,
            step_id=plan.step_id,
            rows=plan.rows,
            num_accepted=np.array(accepted, dtype=np.int32),
            token_ids=np.array(tokens, dtype=np.int32),
            finishes=np.array(finishes, dtype=np.uint8),
            grant_hash=self._grant_hash,
            timings=StepTimings(forward_ns=self.config.step_ns(plan.num_tokens)),
            logprobs=tuple(logprobs),
            errors=tuple(errors),
            prompt_logprobs=tuple(prompt_logprobs),
            num_draft_tokens=num_drafts,
        )

    def _advance(self, row: SimulatedRow, num_scheduled: int, num_drafts: int) -> list[int]:
        """Compute a row's next tokens; returns those drawn, if its known ones come to their end.

        The scheduler counts on every draft, so what it plans may lie beyond what it thinks is known, never beyond what
        is known here and the drafts.
        """
        if row.finish is not RowFinish.GOES_ON:
            return []
        start, end = row.num_computed_tokens, row.num_computed_tokens + num_scheduled
        known, where = end - num_drafts, f"row {row.placement.row}, {row.key}"
        require(known <= row.num_tokens, "no row is scheduled beyond its known tokens", f"{where}, to {known}")
        require(not num_drafts or known == row.num_tokens, "drafts follow the last known token", where)
        require(end < row.max_num_tokens, "no row is scheduled beyond its last token", f"{where}, to {end}")
        self.blocks.write(row.table, start, row.token_ids[start:known])
        if known < row.num_tokens:
            row.num_computed_tokens = known
            return []
        drawn: list[int] = []
        for _ in range(self.config.acceptance.num_tokens(self.num_steps, row.placement.row, num_drafts)):
            position = row.num_tokens - 1
            self.blocks.write(row.table, position, row.token_ids[position:])  # the one before, or a draft that is right
            row.num_computed_tokens = row.num_tokens
            drawn.append(self._draw(row, where))
            if row.finish is not RowFinish.GOES_ON:
                break
        rejected = np.full(end - row.num_computed_tokens, POISON, dtype=np.int32)
        self.blocks.write(row.table, row.num_computed_tokens, rejected)
        return drawn

    def _draw(self, row: SimulatedRow, where: str) -> int:
        """Draw a row's next token from what its blocks hold."""
        context = self.blocks.read(row.table, row.num_tokens)
        require(np.array_equal(context, row.token_ids), "a row reads the tokens it wrote", where)
        request = row.placement
        seed, offset = request.sampling.seed, row.num_output_tokens
        token = self.config.tokens.next_token(context, seed, offset, request.end_token_ids, request.min_tokens)
        row.append(token)
        return token

    def _row(self, index: int) -> SimulatedRow:
        if index not in self.rows:
            raise PlanViolationError("a row that holds a request", f"row {index}")
        return self.rows[index]


def _triples(grants: BlockGrants) -> Iterator[tuple[int, int, int]]:
    return zip(grants.rows.tolist(), grants.indices.tolist(), grants.block_ids.tolist(), strict=True)
