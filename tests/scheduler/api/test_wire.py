"""Phase times, drafts and durations as they travel to clients and executors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.durations import write_duration
from paceline.plan.values import FinishReason
from paceline_scheduler.api import wire
from paceline_scheduler.api.outbox import Finish, PendingDelta
from paceline_scheduler.core.answers import Explanation, RequestState
from paceline_scheduler.core.outputs import DraftCounts
from paceline_scheduler.core.phases import PhaseTimes
from paceline_scheduler.link.wire_contexts import write_context
from paceline_scheduler.wire_phases import read_times, write_times
from scheduler_rig.requests import make_placement, make_request

TIMES = PhaseTimes(0.5, 0.25, 2.0, 0.125)
TOLD = [("queued", 500), ("prefill", 250), ("decode", 2000), ("preempted", 125)]


def told(message):
    """Names and milliseconds of what is set."""
    return [(field.name, value.ToMilliseconds()) for field, value in message.ListFields()]


def finish_of(times):
    finish = Finish(FinishReason.STOP, None, 7, 3, 2, 4, times)
    delta = PendingDelta("r", 2, 1, 77, [5, 6], "ab", finish=finish)
    return wire.generate_response(delta).delta.finish


def test_a_finish_tells_where_the_time_went():
    """Unless that is not known: then it tells nothing, which is not the same as no time."""
    assert told(finish_of(TIMES).times) == TOLD
    assert not finish_of(None).HasField("times")


@pytest.mark.parametrize("times", [TIMES, None])
def test_an_explanation_tells_where_the_time_went_so_far(times):
    response = wire.explain_response(Explanation(RequestState.RUNNING, "", 0, 0, "", "", 3, 1, times))
    assert told(response.times) == (TOLD if times else [])


def test_a_finish_and_an_explanation_tell_the_drafts_and_those_that_were_right():
    finish = Finish(FinishReason.STOP, None, 7, 3, 9, 4, None, drafts=DraftCounts(6, 5))
    usage = wire.generate_response(PendingDelta("r", 2, 1, 77, [5], "a", finish=finish)).delta.finish.usage
    assert (usage.num_draft_tokens, usage.num_accepted_draft_tokens) == (6, 5)
    explanation = Explanation(RequestState.RUNNING, "", 0, 0, "", "", 3, 1, None, DraftCounts(8, 3))
    response = wire.explain_response(explanation)
    assert (response.num_draft_tokens, response.num_accepted_draft_tokens) == (8, 3)


@given(st.lists(st.integers(0, 10**12), min_size=4, max_size=4))
def test_what_is_written_is_read(milliseconds):
    times = PhaseTimes(*(number / 1000 for number in milliseconds))
    assert read_times(write_times(times)) == pytest.approx(times)


# Seconds as messages: any number has one, so that no request can break the stream that it is told on


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
