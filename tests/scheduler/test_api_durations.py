"""Seconds as messages: any number has one, so that no request can break the stream that it is told on."""

import math

import numpy as np
import pytest

from paceline_scheduler.core.plan import NewRequest
from paceline_scheduler.durations import duration
from paceline_scheduler.link.wire_placements import new_request
from paceline_scheduler.testing.requests import make_request

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
    """Beyond its range the nearest one; NaN, which is no time, is none."""
    assert duration(seconds).ToNanoseconds() == nanoseconds


@pytest.mark.parametrize("deadline_s", [2.0**31, 2.0**63, math.inf, math.nan])
def test_a_plan_with_any_deadline_can_be_sent(deadline_s):
    """What cannot be encoded would cost an executor its stream, and all requests on it."""
    none = np.zeros(0, dtype=np.int32)
    assert new_request(NewRequest(0, make_request(2), 1, none, 4, 0, 0, 0, 0, math.nan, None, deadline_s)).context
