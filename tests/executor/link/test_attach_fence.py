"""The fence under any history of arrivals, words, ends and silences: who drives has a right to, and nobody is lost.

What histories do not show, the words of a refusal and its bounds, is told by example at the end.
"""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.values import MAX_TERM, MAX_TERM_RISE, Approach, Claim
from paceline_executor.errors import AttachError, EpochEndedError, TermSupersededError, TooManySchedulersError
from paceline_executor.link.fence import Accepted, Fence, FenceTimes, Refused, Waits

LEASE, RETURN, MAX_WAITING = 10, 2, 2
NOBODY = Claim(0, "")


def history(random, num_events):
    """Events such as a busy executor sees: many arrivals, of all ranks; streams that speak, leave and fall silent."""
    num_streams, highest_term = 0, 1
    for _ in range(num_events):
        match random.choices(("arrive", "note message", "leave", "pass time", "renew"), (4, 6, 2, 6, 1))[0]:
            case "arrive":
                num_streams += 1
                term = random.randint(max(1, highest_term - 1), highest_term + 1)
                highest_term = max(highest_term, term)
                claim = Claim(term, random.choice("abc"), f"{num_streams}:1")
                yield "arrive", num_streams, claim, random.choices(list(Approach), (5, 1))[0]
            case "note message" | "leave" as kind if num_streams:
                yield kind, random.randint(max(1, num_streams - 5), num_streams)
            case "pass time":
                yield "advance", random.choice((1, 1, 1, 2, 3, 9, 10))
            case "renew":
                yield ("renew",)


class Watched:
    """A fence, and what its verdicts and the protocol's sentences together say of every stream."""

    def __init__(self):
        self.fence = Fence(FenceTimes(LEASE, RETURN), MAX_WAITING)
        self.now = 0
        self.claims, self.heard, self.coming = {}, {}, {}  # of open streams
        self.driver, self.last, self.ended = None, NOBODY, 0
        self.epoch = 0

    def tell(self, kind, *details):
        """Let something happen, and check what the fence makes of it; it is woken when it wishes to be alone."""
        stream_id = details[0] if kind != "advance" and details else None
        match kind:
            case "arrive":
                _, self.claims[stream_id], self.coming[stream_id] = details
                self.heard[stream_id] = self.now
                self._check(self.fence.arrive(*details, self.now), arriving=stream_id)
            case "note message":
                if stream_id in self.claims:
                    self.heard[stream_id] = self.now
                self._check(self.fence.note_message(stream_id, self.now))
            case "leave":
                self._forget(stream_id)
                self._check(self.fence.leave(stream_id, self.now))
            case "renew":
                self.heard = dict.fromkeys(self.heard, self.now)
                self.fence.renew(self.now)
            case "advance":
                until = self.now + details[0]
                while (wake := self.fence.next_change_ns()) is not None and self.now < wake <= until:
                    self.now = wake
                    self._check(self.fence.advance(wake))
                self.now = until
        self._check_state()
        is_refused = kind == "arrive" and stream_id not in self.claims
        if kind != "renew" and not is_refused:
            assert not (self._is_free() and self._alive()), "who speaks is not left waiting for a holder that is gone"

    def _check(self, verdicts, arriving=None):
        assert arriving is None or arriving in [verdict.stream_id for verdict in verdicts], "who arrives is answered"
        for verdict in verdicts:
            assert verdict.stream_id in self.claims, "only open streams are ruled on"
            claim = self.claims[verdict.stream_id]
            match verdict:
                case Accepted(stream_id, epoch, displaced):
                    assert claim >= self.last, "claims never fall"
                    self._check_right(stream_id, claim, arriving)
                    assert (displaced, epoch) == (self.driver, self.epoch + 1)
                    if displaced is not None:
                        self._forget(displaced)
                    self.driver, self.last, self.epoch = stream_id, claim, epoch
                case Waits(_, holder):
                    assert (holder, claim > self.last) == (self.last, True)
                    assert not self._comes_first(verdict.stream_id, claim, arriving)
                case Refused(stream_id, error):
                    self._check_refusal(claim, error)
                    self._forget(stream_id)

    def _check_right(self, stream_id, claim, arriving):
        """Who arrives may come first by its name or an operator's order; from the line, the highest that is alive."""
        if self._comes_first(stream_id, claim, arriving):
            return
        assert self._is_free(), "a holder that is alive is not displaced from the line"
        assert stream_id in self._alive()
        assert claim == max(self.claims[other] for other in self._alive())

    def _comes_first(self, stream_id, claim, arriving):
        is_own = claim.scheduler_id == self.last.scheduler_id or self.last == NOBODY
        return stream_id == arriving and (is_own or self.coming[stream_id] is Approach.TAKE_OVER)

    def _check_refusal(self, claim, error):
        if isinstance(error, TooManySchedulersError):
            assert len(self._line()) > MAX_WAITING
        elif isinstance(error, EpochEndedError):
            assert claim.scheduler_id == self.last.scheduler_id
            assert claim <= self.last
        else:
            assert isinstance(error, TermSupersededError)
            assert claim < self.last

    def _check_state(self):
        fence = self.fence
        assert fence.holder == (None if self.driver is None else self.last)
        assert (fence.epoch, fence.num_waiting) == (self.epoch, len(self._line()))
        assert fence.num_waiting <= MAX_WAITING
        assert fence.highest_term >= max((claim.term for claim in self.claims.values()), default=0)

    def _is_free(self):
        free_at = self.ended + RETURN if self.driver is None else self.heard[self.driver] + LEASE
        return self.last != NOBODY and self.now >= free_at

    def _line(self):
        return self.claims.keys() - {self.driver}

    def _alive(self):
        return {stream_id for stream_id in self._line() if self.now - self.heard[stream_id] < LEASE}

    def _forget(self, stream_id):
        self.claims.pop(stream_id, None)
        self.heard.pop(stream_id, None)
        if stream_id == self.driver:
            self.driver, self.ended = None, self.now

    def check_progress(self):
        """Once the holder is silent, one in the queue that speaks is let in."""
        line = set(self._line())
        for _ in range(LEASE):
            self.tell("advance", 1)
            for stream_id in list(self._line()):
                self.tell("note message", stream_id)
        assert not line or self.driver in line


@given(st.integers(0, 2**32))
def test_who_drives_has_a_right_to_and_whoever_is_turned_away_has_none(seed):
    random = Random(seed)  # noqa: S311 - events, no secrets
    for _ in range(10):
        watched = Watched()
        for event in history(random, 80):
            watched.tell(*event)
        watched.check_progress()


@pytest.fixture
def fence():
    """Scheduler m of term 5 drives on stream 1 since time 0."""
    fence = Fence(FenceTimes(LEASE, RETURN), MAX_WAITING)
    fence.arrive(1, Claim(5, "m", "m:50051"), Approach.WAIT, 0)
    return fence


@pytest.mark.parametrize("claim", [Claim(4, "z"), Claim(5, "a")])
@pytest.mark.parametrize("approach", list(Approach))
def test_a_lower_claim_is_refused_with_the_holders_name(fence, claim, approach):
    (refused,) = fence.arrive(2, claim, approach, 1)
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
    (refused,) = fence.arrive(2, Claim(term, "x"), approach, 1)
    assert isinstance(refused.error, AttachError)
    assert (fence.highest_term, fence.num_waiting, fence.epoch, fence.holder.term) == (5, 0, 1, 5)


def test_a_full_queue_refuses_without_a_trace_unless_only_silent_ones_are_in_it(fence):
    for stream_id in (2, 3):
        fence.arrive(stream_id, Claim(6, "z"), Approach.WAIT, 0)
    (refused,) = fence.arrive(4, Claim(20, "y"), Approach.WAIT, 0)
    assert isinstance(refused.error, TooManySchedulersError)
    assert fence.highest_term == 6
    fence.leave(1, 0)
    assert fence.arrive(5, Claim(20, "y"), Approach.WAIT, LEASE)[0] == Accepted(5, 2, None)
