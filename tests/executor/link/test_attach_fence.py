"""Who may drive an executor: the fence with a clock that is told the time.

Each rule by its name; `test_attach_fence_histories` holds all of them against any history.
"""

import pytest

from paceline.plan.values import MAX_TERM, MAX_TERM_RISE, Approach, Claim
from paceline_executor.errors import AttachError, TermSupersededError, TooManySchedulersError
from paceline_executor.link.fence import Accepted, Fence, FenceTimes, Refused, Waits

MS = 1_000_000
TIMES = FenceTimes(lease_ns=1000 * MS, return_ns=100 * MS)
WAIT, TAKE_OVER = Approach.WAIT, Approach.TAKE_OVER


@pytest.fixture
def fence():
    """Scheduler m of term 5 drives on stream 1 since time 0."""
    fence = Fence(TIMES, max_waiting=3)
    fence.arrive(1, Claim(5, "m", "m:50051"), WAIT, 0)
    return fence


def _waits(stream_id, term=5, scheduler_id="m"):
    return Waits(stream_id, Claim(term, scheduler_id))


def test_the_first_scheduler_is_accepted_in_epoch_1():
    assert Fence(TIMES).arrive(1, Claim(1, "a"), WAIT, 0) == (Accepted(1, 1, None),)


@pytest.mark.parametrize("claim", [Claim(4, "z"), Claim(5, "a")])
@pytest.mark.parametrize("approach", list(Approach))
def test_a_lower_claim_is_refused_with_the_holders_name(fence, claim, approach):
    (refused,) = fence.arrive(2, claim, approach, 10 * MS)

    assert isinstance(refused.error, TermSupersededError)
    assert refused.error.metadata == {
        "holder_scheduler_id": "m",
        "holder_term": "5",
        "holder_address": "m:50051",
        "highest_term": "5",
    }
    assert "'m' of term 5" in str(refused.error)


@pytest.mark.parametrize("term", [-1, 0, 6 + MAX_TERM_RISE, MAX_TERM, MAX_TERM + 1, 2**63 - 1])
@pytest.mark.parametrize("approach", list(Approach))
def test_a_term_out_of_bounds_is_refused_and_leaves_no_trace(fence, term, approach):
    """Not even in the highest term, above which others have to rise."""
    (refused,) = fence.arrive(2, Claim(term, "x"), approach, 10 * MS)

    assert isinstance(refused.error, AttachError)
    assert (fence.highest_term, fence.num_waiting, fence.epoch, fence.holder.term) == (5, 0, 1, 5)


def test_a_lower_claim_is_refused_even_when_nobody_drives(fence):
    """Claims that are accepted never go down."""
    fence.leave(1, 10 * MS)

    assert isinstance(fence.arrive(2, Claim(4, "z"), WAIT, 5000 * MS)[0], Refused)


def test_a_higher_claim_waits_while_the_holder_lives(fence):
    (verdict,) = fence.arrive(2, Claim(6, "z"), WAIT, 10 * MS)

    assert (verdict, verdict.holder.address) == (_waits(2), "m:50051")
    assert (fence.holder, fence.highest_term, fence.num_waiting) == (Claim(5, "m"), 6, 1)


def test_a_takeover_displaces_a_live_holder(fence):
    assert fence.arrive(2, Claim(6, "z"), TAKE_OVER, 10 * MS) == (Accepted(2, 2, 1),)


def test_one_in_line_gets_the_executor_100_ms_after_the_holders_stream_ended(fence):
    """Not earlier: the holder may come back."""
    fence.arrive(2, Claim(6, "z"), WAIT, 10 * MS)
    fence.note_message(2, 450 * MS)

    assert fence.leave(1, 500 * MS) == ()
    assert fence.next_change_ns() == 600 * MS
    assert fence.advance(599 * MS) == ()
    assert fence.advance(600 * MS) == (Accepted(2, 2, None),)


def test_the_holder_that_comes_back_within_100_ms_goes_on(fence):
    fence.arrive(2, Claim(6, "z"), WAIT, 10 * MS)
    fence.leave(1, 500 * MS)

    assert fence.arrive(3, Claim(5, "m"), WAIT, 599 * MS) == (Accepted(3, 2, None), _waits(2))


def test_the_holder_that_comes_back_too_late_is_refused(fence):
    fence.arrive(2, Claim(6, "z"), WAIT, 10 * MS)
    fence.leave(1, 500 * MS)
    fence.note_message(2, 600 * MS)

    assert isinstance(fence.arrive(3, Claim(5, "m"), WAIT, 601 * MS)[0], Refused)


def test_the_holder_replaces_its_own_stream_at_once(fence):
    assert fence.arrive(2, Claim(5, "m"), WAIT, 10 * MS) == (Accepted(2, 2, 1),)
    assert fence.leave(1, 20 * MS) == ()
    assert fence.holder == Claim(5, "m")


def test_the_holder_may_come_back_with_a_higher_term_but_not_with_a_lower_one(fence):
    assert fence.arrive(2, Claim(7, "m"), WAIT, 10 * MS) == (Accepted(2, 2, 1),)
    assert isinstance(fence.arrive(3, Claim(6, "m"), WAIT, 20 * MS)[0], Refused)


def test_a_holder_silent_for_the_lease_loses_the_executor_to_one_in_line(fence):
    """Its stream has to end: it is displaced."""
    fence.arrive(2, Claim(6, "z"), WAIT, 10 * MS)
    fence.note_message(1, 200 * MS)
    fence.note_message(2, 1100 * MS)

    assert fence.next_change_ns() == 1200 * MS
    assert fence.advance(1199 * MS) == ()
    assert fence.advance(1200 * MS) == (Accepted(2, 2, 1),)


def test_a_holder_that_was_silent_goes_on_if_nobody_came(fence):
    assert fence.next_change_ns() is None
    assert fence.note_message(1, 60_000 * MS) == ()
    assert fence.arrive(2, Claim(6, "z"), WAIT, 60_001 * MS) == (_waits(2),)


def test_a_holder_that_is_silent_when_a_higher_one_arrives_is_displaced_at_once(fence):
    """There is nobody to wait for."""
    assert fence.arrive(2, Claim(6, "z"), WAIT, 1000 * MS) == (Accepted(2, 2, 1),)


def test_of_those_in_line_the_highest_gets_the_executor_and_lower_ones_are_refused(fence):
    """So that every executor picks the same one; the lower ones come back with a higher term."""
    fence.arrive(2, Claim(6, "a"), WAIT, 10 * MS)
    fence.arrive(3, Claim(7, "b"), WAIT, 20 * MS)
    accepted, refused = fence.leave(1, 100 * MS) or fence.advance(200 * MS)

    assert accepted == Accepted(3, 2, None)
    assert refused.stream_id == 2
    assert fence.num_waiting == 0


def test_a_silent_one_in_line_is_passed_over_until_it_speaks(fence):
    """Giving it the executor would only cost another lease."""
    fence.arrive(2, Claim(6, "a"), WAIT, 0)
    fence.arrive(3, Claim(7, "b"), WAIT, 0)
    fence.note_message(2, 900 * MS)

    accepted, still_waits = fence.advance(1000 * MS)

    assert accepted == Accepted(2, 2, 1)
    assert still_waits == _waits(3, 6, "a")


def test_one_in_line_that_leaves_is_forgotten(fence):
    """Nobody is left to accept."""
    fence.arrive(2, Claim(6, "z"), WAIT, 10 * MS)
    fence.leave(2, 20 * MS)
    fence.leave(1, 30 * MS)

    assert fence.advance(5000 * MS) == ()
    assert fence.holder is None


def test_after_its_own_standstill_the_executor_blames_nobody(fence):
    fence.arrive(2, Claim(6, "z"), WAIT, 10 * MS)
    fence.renew(5000 * MS)

    assert fence.advance(5999 * MS) == ()
    assert fence.advance(6000 * MS) == ()
    fence.note_message(2, 6001 * MS)
    assert fence.holder == Claim(6, "z")


def test_the_line_has_an_end(fence):
    for stream_id in (2, 3, 4):
        fence.arrive(stream_id, Claim(stream_id + 4, "z"), WAIT, 0)

    (refused,) = fence.arrive(5, Claim(20, "z"), WAIT, 0)

    assert isinstance(refused.error, TooManySchedulersError)
    assert fence.highest_term == 8


def test_a_line_full_of_silent_ones_keeps_nobody_from_a_free_executor(fence):
    for stream_id in (2, 3, 4):
        fence.arrive(stream_id, Claim(stream_id + 4, "z"), WAIT, 0)
    fence.leave(1, 0)

    assert fence.arrive(5, Claim(20, "y"), WAIT, 1000 * MS)[0] == Accepted(5, 2, None)
