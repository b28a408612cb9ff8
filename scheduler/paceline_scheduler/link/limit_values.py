"""The bounds that operators may change while the scheduler runs: read from the core's, and put into them."""

from collections.abc import Iterable
from dataclasses import replace

from paceline_scheduler.backend import LimitValues
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.link.attachment import Attachment

_ANY_NUM_TOKENS = 65_536  # until an executor has said what it allows


def limit_values(limits: CoreLimits, executors: Iterable[Attachment]) -> LimitValues:
    """Return the bounds in force: a step's is what executors allow where this scheduler sets none of its own."""
    allowed = (e.description.max_num_batched_tokens for e in executors if e.description is not None)
    return LimitValues(
        max_num_queued_reqs=limits.max_num_queued_reqs,
        max_num_queued_tokens=limits.max_num_queued_tokens,
        max_num_batched_tokens=limits.max_num_batched_tokens or max(allowed, default=_ANY_NUM_TOKENS),
    )


def changed(limits: CoreLimits, before: LimitValues, wanted: LimitValues) -> CoreLimits:
    """Return the core's bounds with the wanted ones; `before` are those in force."""
    is_step_changed = wanted.max_num_batched_tokens != before.max_num_batched_tokens
    return replace(
        limits,
        max_num_queued_reqs=wanted.max_num_queued_reqs,
        max_num_queued_tokens=wanted.max_num_queued_tokens,
        max_num_batched_tokens=wanted.max_num_batched_tokens if is_step_changed else limits.max_num_batched_tokens,
    )
