"""The core's bounds. Each has a reason to be changed by an operator or a test; nothing else is configurable."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Bounds of queue and steps.

    max_num_batched_tokens: tokens of one step at most; None takes the executor's own bound.
    max_plans_in_flight: unanswered plans per executor; two hide planning and the network behind the running step.
    max_step_s: no step is planned to take longer, so that silence can be told from work (architecture: step bound).
    target_step_s: what a step may take while some request decodes: the inter-token time that a long prompt beside it
    may cause.
    """

    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 4_194_304
    max_num_batched_tokens: int | None = None
    max_plans_in_flight: int = 2
    max_step_s: float = 0.5
    target_step_s: float = 0.1
