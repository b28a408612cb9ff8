"""The core's bounds. Each has a reason to be changed by an operator or a test; nothing else is configurable."""

import math
from dataclasses import dataclass, replace

_MARGIN = 0.9
"""How much of a budget is spent by prediction: half of what is planned right up to a bound would miss it."""
_STEPS_OF_DECODES = 5
"""How many steps of its decodes alone a step with prompts may last: prompts then get four fifths of the time."""
_MAX_STRETCH = 4
"""How many times `target_step_s` that may come to."""


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Bounds of queue and steps.

    max_num_batched_tokens: tokens of one step at most; None takes the executor's own bound.
    max_plans_in_flight: unanswered plans per executor, however long their steps; two hide planning and the network
    behind the running step.
    run_ahead_s: further plans, as many as the executor takes, are sent while those unanswered are predicted to take
    less than this. Short steps then travel together: a message costs a good part of what such a step does.
    max_step_s: no step is planned to take longer, so that silence can be told from work (architecture: step bound).
    max_num_draft_tokens: drafts of a row and step at most, where an executor can draft; 0 for none.
    ttft_budget_s: a request that is not expected to get its first token within this time is refused.
    itl_budget_s: no request is placed beside others if the steps that decode them all would take longer.
    target_step_s: what a step may take that computes prompts beside decodes: the inter-token time that a long prompt
    causes. Up to four times as much where decodes alone take more than a fifth of it, so that prompts go on.
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

    def mixed_step_s(self, decodes_s: float) -> float:
        """The predicted time that a step with prompts may take, if its decodes alone take this long."""
        wanted_s = min(max(self.target_step_s, _STEPS_OF_DECODES * decodes_s), _MAX_STRETCH * self.target_step_s)
        return min(wanted_s, _MARGIN * self.itl_budget_s, self.max_step_s)

    def num_plans_ahead(self, step_s: float, at_most: int) -> int:
        """How many plans of steps this long may be unanswered at a busy executor that takes so many."""
        return min(max(self.max_plans_in_flight, math.ceil(self.run_ahead_s / step_s)), at_most)

    @property
    def decode_only_step_s(self) -> float:
        return _MARGIN * self.itl_budget_s

    @property
    def expected_first_token_s(self) -> float:
        return _MARGIN * self.ttft_budget_s


@dataclass(frozen=True, slots=True)
class LimitValues:
    """Bounds that operators can change while the scheduler runs."""

    max_num_queued_reqs: int
    max_num_queued_tokens: int
    max_num_batched_tokens: int


def changed(limits: CoreLimits, before: LimitValues, wanted: LimitValues) -> CoreLimits:
    """Return the bounds with the wanted ones; `before` are those in force."""
    is_step_changed = wanted.max_num_batched_tokens != before.max_num_batched_tokens
    return replace(
        limits,
        max_num_queued_reqs=wanted.max_num_queued_reqs,
        max_num_queued_tokens=wanted.max_num_queued_tokens,
        max_num_batched_tokens=wanted.max_num_batched_tokens if is_step_changed else limits.max_num_batched_tokens,
    )
