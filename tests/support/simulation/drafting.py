"""Rows that verify drafts, which executors do not do yet: what schedulers plan for them is tried out all the same.

A plan is launched as if it had no drafts; then its step is told that it may bring more tokens, and the runner draws
them. Nothing may be launched ahead of such a step. What becomes of several tokens of a row is the production's.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from paceline.plan.values import BatchPlan, Int32Array, StepResult
from paceline_executor.errors import PlanError, PlanFault
from paceline_executor.limits import RowLimits
from paceline_executor.rows.table import Launched, RowTable
from paceline_executor.runner.interface import StepBatch, StepOutput
from paceline_executor.runner.simulated import EMPTY_SLOT, logprobs_of
from paceline_executor.runner.step_times import StepTimes
from paceline_executor.testing.hash_runner import HashRule
from paceline_executor.testing.hiding_runner import kept_rows
from simulation.device import SlotRunner

_NO_DRAFTS: Int32Array = np.zeros(0, dtype=np.int32)


class DraftingSlots(SlotRunner):
    """A runner that draws up to a token more than a row has drafts; those that are wrong leave their slots unwritten.

    `num_drafts`: of each row of the next batch, whose block tables are whole then. `num_tokens` says how many tokens a
    row gets that has so many drafts, none for a row that is left for another step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        rule: HashRule,
        report: Callable[[str], None],
        num_tokens: Callable[[int], int],
        step_times: StepTimes = StepTimes(),  # noqa: B008 - it never changes
    ) -> None:
        super().__init__(num_blocks, block_size, rule, report, step_times)
        self.num_drafts = _NO_DRAFTS
        self._num_tokens = num_tokens

    def launch(self, batch: StepBatch) -> StepOutput:
        """See Runner."""
        output, num_drafts = super().launch(batch), self.num_drafts
        if not num_drafts.size:
            return output
        ends = np.cumsum(output.num_accepted)
        drawn: list[list[int]] = []
        for index, row in enumerate(batch.sampled.tolist()):
            tokens = output.token_ids[ends[index] - output.num_accepted[index] : ends[index]].tolist()
            drawn.append(self._verify(batch, index, tokens, int(num_drafts[row])) if tokens else tokens)
        token_ids = [token_id for tokens in drawn for token_id in tokens]
        num_top = int(batch.sampling.num_logprobs.max(initial=-1))
        return replace(
            output,
            num_accepted=np.array([len(tokens) for tokens in drawn], dtype=np.int32),
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=logprobs_of(token_ids, num_top) if num_top >= 0 else None,
        )

    def _verify(self, batch: StepBatch, index: int, tokens: list[int], num_drafts: int) -> list[int]:
        """Go on with as many drafts as are right; a row with rules has none."""
        row, sampling, block_size = int(batch.sampled[index]), batch.sampling, self._slots.shape[1]
        end, block_table = int(batch.context_lens[row]), batch.block_tables[row]
        context = self.context(batch, row).tolist()
        num_tokens = self._num_tokens(num_drafts) if num_drafts and sampling.rules is None else 1
        seed, offset = int(sampling.seeds[index]), int(sampling.offsets[index])
        while len(tokens) < num_tokens and tokens[-1] not in self.rule.end_token_ids:
            context.append(tokens[-1])
            tokens.append(self.rule.next_token(context, seed, offset + len(tokens)))
        positions = np.arange(end, end + num_drafts, dtype=np.int32)
        written = np.full(num_drafts, EMPTY_SLOT, dtype=np.int32)  # those that are wrong
        written[: len(tokens) - 1] = tokens[:-1]
        self._put(block_table[positions // block_size], positions % block_size, written)
        return tokens if num_tokens else []


class DraftingTable(RowTable):
    """Rows of which each may get up to a token more than it has drafts in a plan. `slots` draws them."""

    def __init__(self, limits: RowLimits, slots: DraftingSlots) -> None:
        super().__init__(limits)
        self.slots = slots

    def can_launch(self, plan: BatchPlan) -> bool:
        """See RowTable. How far a row with drafts in flight comes is not known."""
        has_drafts = any(launched.plan.num_draft_tokens.any() for launched in self._in_flight)
        return not has_drafts and super().can_launch(plan)

    def launch(self, plan: BatchPlan, now_ns: int, *, is_carried: bool = False) -> Launched:
        """See RowTable."""
        self.slots.num_drafts = _NO_DRAFTS
        if not plan.num_draft_tokens.size:
            return super().launch(plan, now_ns, is_carried=is_carried)
        num_scheduled = self._num_scheduled(plan)
        sober = replace(plan, num_scheduled_tokens=num_scheduled, num_draft_tokens=_NO_DRAFTS)
        launched = super().launch(sober, now_ns, is_carried=is_carried)
        try:
            launched = self._in_flight[-1] = self._with_drafts(replace(launched, plan=plan))
        except PlanError:
            self._in_flight.pop().undo.roll_back()
            raise
        return launched

    def _num_scheduled(self, plan: BatchPlan) -> Int32Array:
        """How many tokens of each row are no drafts."""
        num_tokens, num_drafts = plan.num_scheduled_tokens, plan.num_draft_tokens
        if num_tokens.size != num_drafts.size:
            raise PlanError(PlanFault.COLUMN_LENGTH, "columns have the same length")
        if ((num_drafts < 0) | (num_drafts >= num_tokens)).any():
            raise PlanError(PlanFault.TOKENS_UNKNOWN, "drafts follow a token that is none")
        if plan.num_tokens > self.limits.max_num_batched_tokens:
            raise PlanError(PlanFault.TOO_MANY_TOKENS, "no more tokens than a step takes")
        return num_tokens - num_drafts

    def land(self, launched: Launched, output: StepOutput) -> StepResult:
        """See RowTable."""
        num_drafts = launched.plan.num_draft_tokens
        if not num_drafts.size:
            return super().land(launched, output)
        result = super().land(*self._without_idle(launched, output))
        return replace(result, num_draft_tokens=np.where(result.num_accepted > 0, num_drafts, 0).astype(np.int32))

    def _check_reach(self, rows: Int32Array, end: Int32Array) -> None:
        """Check up to which positions rows with drafts come."""
        columns = self._columns
        last = np.minimum(columns.max_known[rows], self.limits.max_model_len)
        if (end >= last).any():
            raise PlanError(PlanFault.TOKENS_UNKNOWN, "no row is scheduled beyond its last token")
        if (end > columns.num_blocks[rows] * self.limits.block_size).any():
            raise PlanError(PlanFault.BLOCK_MISSING, "drafts lie in blocks of their row")

    def _without_idle(self, launched: Launched, output: StepOutput) -> tuple[Launched, StepOutput]:
        """The step and what came of it without rows that it left as they were."""
        prepared, columns = launched.prepared, self._columns
        sampled = prepared.batch.sampled
        is_idle = (output.num_accepted == 0) & ~np.isin(sampled, list(output.problems))
        if not is_idle.any():
            return launched, output
        idle = sampled[is_idle]
        columns.computed_bound[prepared.rows[idle]] -= prepared.num_tokens[idle]
        columns.known_bound[prepared.rows[idle]] -= prepared.num_draws[is_idle]
        is_kept = np.ones(prepared.rows.size, dtype=np.bool_)
        is_kept[idle] = False
        number = np.cumsum(is_kept) - 1
        num_draws = prepared.num_draws[~is_idle]
        prepared = replace(
            prepared,
            batch=kept_rows(prepared.batch, is_kept),
            rows=prepared.rows[is_kept],
            places=prepared.places[is_kept],
            num_tokens=prepared.num_tokens[is_kept],
            num_draws=num_draws,
            max_drawn=int(num_draws.sum()),
        )
        problems = {int(number[row]): problem for row, problem in output.problems.items()}
        prompt_logprobs = {int(number[row]): told for row, told in output.prompt_logprobs.items() if is_kept[row]}
        output = replace(
            output, num_accepted=output.num_accepted[~is_idle], problems=problems, prompt_logprobs=prompt_logprobs
        )
        launched = self._in_flight[0] = replace(launched, prepared=prepared)
        return launched, output

    def _with_drafts(self, launched: Launched) -> Launched:
        prepared, columns = launched.prepared, self._columns
        num_drafts = launched.plan.num_draft_tokens[prepared.places]
        sampled = prepared.batch.sampled
        if (np.delete(num_drafts, sampled) > 0).any():
            raise PlanError(PlanFault.TOKENS_UNKNOWN, "drafts follow the last known token")
        self._check_reach(prepared.rows, prepared.batch.context_lens + num_drafts)
        rows, drawing = prepared.rows, prepared.rows[sampled]

        def lower() -> None:
            columns.computed_bound[rows] -= num_drafts
            columns.known_bound[drawing] -= num_drafts[sampled]

        launched.undo.add(lower)
        columns.computed_bound[rows] += num_drafts
        columns.known_bound[drawing] += num_drafts[sampled]
        self.slots.num_drafts = num_drafts
        batch = replace(prepared.batch, block_tables=columns.block_table[rows])  # drafts may need more blocks
        num_draws = prepared.num_draws + num_drafts[sampled]
        num_tokens = prepared.num_tokens + num_drafts
        prepared = replace(
            prepared, batch=batch, num_draws=num_draws, num_tokens=num_tokens, max_drawn=int(num_draws.sum())
        )
        return replace(launched, prepared=prepared)
