"""The core's bounds. Operators or tests change each of them."""

import math
from dataclasses import dataclass, field, replace

from paceline_scheduler.access.tenant_limits import TenantBounds

_MARGIN = 0.9
"""The share of a budget that predictions may spend: right up to a bound half would miss it."""
_STEPS_OF_DECODES = 5
"""A step with prompts may last so many steps of its decodes alone: prompts then get four fifths of the time."""
_MAX_STRETCH = 4
"""How many times `target_step_s` that may come to."""


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """max_num_batched_tokens: of a step; None takes the executor's own bound.
    max_plans_in_flight: unanswered plans per executor, however long their steps; two hide planning and the network
    behind the running step.
    run_ahead_s: further plans are sent while those unanswered take less than this; a message costs a good part of a
    short step.
    max_step_s: no step is planned to take longer, so that silence can be told from work.
    max_num_draft_tokens: of a row and step; 0 for none.
    ttft_budget_s: a request that would get its first token later is refused.
    itl_budget_s: no request is placed beside others if the steps that decode them all would take longer.
    target_step_s: of a step that computes prompts beside decodes, unless these alone take more than a fifth of it.
    tenants: the bounds of each tenant, among them its share of the blocks.
    """

    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 4_194_304
    ttft_budget_s: float = 60.0
    itl_budget_s: float = 0.25
    max_num_batched_tokens: int | None = None
    max_plans_in_flight: int = 2
    run_ahead_s: float = 0.025
    max_step_s: float = 0.5
    max_num_draft_tokens: int = 63
    target_step_s: float = 0.025
    tenants: TenantBounds = field(default_factory=TenantBounds)

    def mixed_step_s(self, decodes_s: float) -> float:
        """For a step with prompts whose decodes alone take `decodes_s`."""
        wanted_s = min(max(self.target_step_s, _STEPS_OF_DECODES * decodes_s), _MAX_STRETCH * self.target_step_s)
        return min(wanted_s, _MARGIN * self.itl_budget_s, self.max_step_s)

    def num_plans_ahead(self, step_s: float, at_most: int) -> int:
        """A busy executor takes `at_most` plans, here of `step_s` each."""
        return min(max(self.max_plans_in_flight, math.ceil(self.run_ahead_s / step_s)), at_most)

    @property
    def decode_only_step_s(self) -> float:
        return _MARGIN * self.itl_budget_s

    @property
    def expected_first_token_s(self) -> float:
        return _MARGIN * self.ttft_budget_s


@dataclass(frozen=True, slots=True)
class LimitValues:
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    max_num_batched_tokens: int
    tenants: TenantBounds = field(default_factory=TenantBounds)


def changed(limits: CoreLimits, before: LimitValues, wanted: LimitValues) -> CoreLimits:
    """`before` are the bounds in force."""
    is_step_changed = wanted.max_num_batched_tokens != before.max_num_batched_tokens
    return replace(
        limits,
        max_num_queued_reqs=wanted.max_num_queued_reqs,
        max_num_queued_tokens=wanted.max_num_queued_tokens,
        max_num_batched_tokens=wanted.max_num_batched_tokens if is_step_changed else limits.max_num_batched_tokens,
        tenants=wanted.tenants,
    )
