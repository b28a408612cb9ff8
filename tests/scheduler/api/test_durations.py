"""Seconds as messages: any number has one, so that no request can break the stream that it is told on."""

import math

import pytest

from paceline.plan.durations import write_duration
from paceline_scheduler.link.wire_contexts import write_context
from paceline_scheduler.testing.requests import make_placement, make_request

LONGEST_S = 315_576_000_000


@pytest.mark.parametrize(
    ("seconds", "nanoseconds"),
    [
        *((0.0, 0), (0.5, 500_000_000), (2.0**31, 2**31 * 10**9)),
        *((seconds, LONGEST_S * 10**9) for seconds in (float(LONGEST_S), 4e11, 2.0**63 - 1024, 2.0**63, math.inf)),
        *((seconds, 0) for seconds in (-1.0, -math.inf, math.nan)),
    ],
)
def test_every_number_of_seconds_has_a_message(seconds, nanoseconds):
    assert write_duration(seconds).ToNanoseconds() == nanoseconds


@pytest.mark.parametrize("deadline_s", [2.0**31, 2.0**63, math.inf, math.nan])
def test_a_plan_with_any_deadline_can_be_sent(deadline_s):
    """What cannot be encoded would cost an executor its stream, and all requests on it."""
    placement = make_placement(0, make_request(2), waited_s=math.nan, deadline_left_s=deadline_s)
    assert write_context(placement.request, placement.history)
