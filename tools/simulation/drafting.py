"""Rows that verify drafts, which executors do not do yet: what schedulers plan for them is tried out all the same.

A plan is launched as if it had no drafts; then its step is told that it may bring more tokens, and the runner draws
them. Nothing may be launched ahead of such a step. What becomes of several tokens of a row is the production's.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from paceline.plan.values import BatchPlan, Int32Array, StepResult
from paceline_executor.errors import PlanError, PlanFault
from paceline_executor.rows.limits import RowLimits
from paceline_executor.rows.table import Launched, RowTable
from paceline_executor.runner.interface import StepBatch, StepOutput
from paceline_executor.runner.simulated import logprobs_of
from paceline_executor.testing.rule_runner import HashRule
from simulation.device import SlotRunner

_NO_DRAFTS: Int32Array = np.zeros(0, dtype=np.int32)


class DraftingSlots(SlotRunner):
    """A runner that draws up to a token more than a row has drafts; those that are wrong leave their slots unwritten.

    `num_drafts`: of each row of the next batch, whose block tables are whole then.
    """

    def __init__(
        self, num_blocks: int, block_size: int, rule: HashRule, report: Callable[[str], None], seed: int
    ) -> None:
        super().__init__(num_blocks, block_size, rule, report)
        self.num_drafts = _NO_DRAFTS
        self._random = Random(seed)  # noqa: S311 - nothing secret

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
        context = self._context(batch, row).tolist()
        num_right = 0 if sampling.rules is not None else self._random.randint(0, num_drafts)
        seed, offset = int(sampling.seeds[index]), int(sampling.offsets[index])
        while len(tokens) <= num_right and tokens[-1] not in self.rule.end_token_ids:
            position = len(context)
            self._slots[block_table[position // block_size], position % block_size] = tokens[-1]
            context.append(tokens[-1])
            tokens.append(self.rule.next_token(context, seed, offset + len(tokens)))
        positions = np.arange(len(context), end + num_drafts)
        self._slots[block_table[positions // block_size], positions % block_size] = -1
        return tokens


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
        num_scheduled = plan.num_scheduled_tokens - plan.num_draft_tokens
        sober = replace(plan, num_scheduled_tokens=num_scheduled, num_draft_tokens=_NO_DRAFTS)
        launched = super().launch(sober, now_ns, is_carried=is_carried)
        launched = self._in_flight[-1] = self._with_drafts(replace(launched, plan=plan))
        return launched

    def land(self, launched: Launched, output: StepOutput) -> StepResult:
        """See RowTable."""
        result, num_drafts = super().land(launched, output), launched.plan.num_draft_tokens
        if not num_drafts.size:
            return result
        return replace(result, num_draft_tokens=np.where(result.num_accepted > 0, num_drafts, 0).astype(np.int32))

    def _with_drafts(self, launched: Launched) -> Launched:
        prepared, columns = launched.prepared, self._columns
        num_drafts = launched.plan.num_draft_tokens[prepared.places]
        sampled = prepared.batch.sampled
        if (np.delete(num_drafts, sampled) > 0).any():
            raise PlanError(PlanFault.TOKENS_UNKNOWN, "drafts follow the last known token")
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
