"""Plans that reached a simulated executor and have not run: what must hold when a plan arrives.

These rules concern what the scheduler may know when it writes a plan: results that it has not got yet confirm nothing.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np

from paceline.plan.values import NO_KEY, BatchPlan, BlockGrants
from paceline_scheduler.simulator.blocks import SimulatedBlocks
from paceline_scheduler.simulator.config import SimulatorConfig
from paceline_scheduler.simulator.rows import SimulatedRow
from paceline_scheduler.simulator.violations import require


class PlanInbox:
    """The plans of one epoch, in order."""

    def __init__(self, config: SimulatorConfig, incarnation: int, epoch: int) -> None:
        self.waiting: deque[BatchPlan] = deque()
        self._config = config
        self._incarnation = incarnation
        self._epoch = epoch
        self._next_step_id = 1

    def receive(self, plan: BatchPlan, rows: Mapping[int, SimulatedRow], blocks: SimulatedBlocks) -> None:
        """Take a plan in. `rows` and `blocks` are as the last finished step left them."""
        self._check_identity(plan)
        self._check_columns(plan)
        self._check_confirmed(plan, rows)
        for block, key in plan.tags:
            filled = key == NO_KEY or blocks.is_full(block)
            require(filled, "tag of a block before the result that filled it", f"block {block}")
        self._next_step_id += 1
        self.waiting.append(plan)

    def _check_identity(self, plan: BatchPlan) -> None:
        require(plan.incarnation == self._incarnation, "a plan names the incarnation", f"step {plan.step_id}")
        require(plan.epoch == self._epoch, "a plan names the epoch", f"step {plan.step_id}, epoch {plan.epoch}")
        require(plan.step_id == self._next_step_id, "no gap between plans", f"{plan.step_id}, not {self._next_step_id}")
        in_flight = len(self.waiting) + 1
        require(in_flight <= self._config.max_plans_in_flight, "no more plans in flight", f"{in_flight}")

    def _check_columns(self, plan: BatchPlan) -> None:
        rows = plan.rows.tolist()
        where = f"step {plan.step_id}"
        require(len(rows) == len(set(rows)), "each row at most once", where)
        require(len(rows) == len(plan.num_scheduled_tokens), "columns have the same length", where)
        require(bool((plan.num_scheduled_tokens > 0).all()), "a row that runs computes at least one token", where)
        drafts = plan.num_draft_tokens if len(plan.num_draft_tokens) else np.zeros_like(plan.num_scheduled_tokens)
        require(len(rows) == len(drafts), "columns have the same length", where)
        are_behind = bool(((drafts >= 0) & (drafts < plan.num_scheduled_tokens)).all())
        require(are_behind, "drafts follow a token that is none", where)
        require(plan.num_tokens <= self._config.max_num_batched_tokens, "no more tokens than a step takes", where)
        named = (*rows, *(release.row for release in plan.releases), *(place.row for place in plan.new_requests))
        in_range = all(0 <= row < self._config.max_num_rows for row in named)
        require(in_range, "rows are those of the executor", where)
        for grants in (plan.grants, plan.shared):
            _check_grants(grants, where)

    def _check_confirmed(self, plan: BatchPlan, rows: Mapping[int, SimulatedRow]) -> None:
        placed = {place.row for other in self.waiting for place in other.new_requests}
        keys = {place.record_id for other in self.waiting for place in other.new_requests}
        keys |= {row.key for row in rows.values()}
        for place in plan.new_requests:
            where = f"row {place.row}, {place.record_id}"
            require(place.row not in placed and place.row not in rows, "row reuse before confirmation", where)
            require(place.record_id not in keys, "placement of a request that has not left its row", where)


def _check_grants(grants: BlockGrants, where: str) -> None:
    lengths = {len(grants.rows), len(grants.indices), len(grants.block_ids)}
    require(len(lengths) == 1, "columns have the same length", where)
