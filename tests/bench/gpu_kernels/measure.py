"""From a case to a result: build its inputs, compare with the reference, time it. Knows no operation."""

import math

from gpu_kernels.anchors import Anchors, MeasurementError
from gpu_kernels.case import Case, at_once
from gpu_kernels.results import Ceilings, Result
from gpu_kernels.timing import Clock

# So many bytes of inputs take turns: three times what an H200's second level of the cache holds.
_ROTATED_BYTES = 3 * 60 * 2**20


class WrongResultError(MeasurementError):
    """An operation computed something else than its reference, so its time says nothing."""


def check(case: Case) -> None:
    """Raise WrongResultError if the operation's result is not the reference's, but for rounding."""
    _check(case, case.build(0).error(at_once))


def measure(case: Case, clock: Clock, ceilings: Ceilings, anchors: Anchors) -> Result:
    """Check a case, time it, check what a replay leaves, time what torch has for it. Raises WrongResultError."""
    num_sets = min(max(1, math.ceil(_ROTATED_BYTES / case.num_bytes)), clock.max_sets)
    works = [case.build(1000 * index) for index in range(num_sets)]
    _check(case, works[0].error(at_once))
    timing = clock.time([work.ours for work in works])
    _check(case, works[0].error(clock.replayed))
    others = [work.theirs for work in works if work.theirs is not None]
    theirs, torch_failure = None, ""
    try:
        theirs = clock.time(others) if others else None
    except Exception as error:  # what torch cannot do is no failure of ours
        torch_failure = type(error).__name__
    return Result(case, timing, theirs, anchors.best(case.anchor), ceilings, torch_failure)


def _check(case: Case, error: float) -> None:
    if not error <= case.allowed_error:  # NaN is no error that is allowed
        raise WrongResultError(f"the error is {error:.2g}, allowed are {case.allowed_error:.2g}")
