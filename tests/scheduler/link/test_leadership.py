"""Leadership by itself, told what was seen and when: what must hold whatever happens, and in which order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from both_sides.audited import make_executor
from paceline.plan.values import MAX_TERM, Approach, Claim, ExecutorInfo
from paceline_scheduler import errors
from paceline_scheduler.link.claim import MAX_RISE, OwnClaim
from paceline_scheduler.link.executor_record import LOST_AFTER_S, LinkPhase
from paceline_scheduler.link.leadership import (
    Detached,
    Displaced,
    EndStream,
    InLine,
    Leadership,
    Lost,
    Readiness,
    ServingStatus,
)

FIRST, SECOND = "executor:1", "executor:2"
BOTH = (FIRST, SECOND)
OTHER = Claim(7, "scheduler-z", "z:1")


def nobody_drains(_):
    return False


def description(address, incarnation):
    """An executor as its welcome describes it."""
    executor = make_executor(incarnation=incarnation)
    described, _ = executor.attach(address)
    return described


def looking_for(*addresses, approach=Approach.WAIT, terms=None):
    """Leadership of scheduler m that has just been told of these executors, at time 0."""
    leadership = Leadership(OwnClaim("scheduler-m", approach))
    infos = {address: ExecutorInfo(1, term, "") for address, term in (terms or {}).items()}
    leadership.look(addresses, infos, 0.0)
    for address in addresses:
        leadership.expect(address, 0)
    return leadership


def find(leadership, address, incarnation=1, term=0, holder="", now_s=0.0):
    """The executor says who it is; returns the hello that it is sent."""
    greeting = leadership.found(address, ExecutorInfo(incarnation, term, holder), now_s, 0.5)
    return greeting and greeting.hello


def drive(leadership, address, incarnation=1, now_s=0.0, **info):
    assert find(leadership, address, incarnation, now_s=now_s, **info)
    leadership.syncing(address, incarnation)
    leadership.welcomed(description(address, incarnation), now_s)


def test_the_first_claim_is_above_all_terms_told():
    """Also above those of executors that nobody can attach to later."""
    leadership = looking_for(*BOTH, terms={FIRST: 3, SECOND: 8})
    assert find(leadership, FIRST).claim.term == 9


def test_requests_wait_for_word_of_every_executor():
    """Of one by its welcome, of the other when nobody listens there."""
    leadership = looking_for(*BOTH)
    drive(leadership, FIRST)
    assert not leadership.awaited.is_empty
    assert leadership.readiness(nobody_drains) == Readiness(ServingStatus.SERVING)
    verdicts = leadership.ended(SECOND, errors.UnreachableError("refused"), 0.1, 0.5)
    assert verdicts == (Detached(SECOND, "refused", was_driven=False), Lost(SECOND, was_serving=False))
    assert leadership.awaited.is_empty


def test_an_executor_that_says_nothing_is_lost_in_the_end():
    leadership = looking_for(FIRST)
    drive(leadership, FIRST)
    assert leadership.advance(1.5) == ()
    (detached,) = leadership.ended(FIRST, errors.StreamEndedError("silent"), 5.0, 0.5)
    assert detached == Detached(FIRST, "silent", was_driven=True)
    assert leadership.next_change_s() == 5.0 + LOST_AFTER_S
    assert leadership.advance(6.4) == ()
    assert leadership.advance(6.5) == (Lost(FIRST, was_serving=True),)
    assert leadership.advance(60.0) == ()
    assert leadership.readiness(nobody_drains) == Readiness(ServingStatus.NOT_SERVING)


def test_who_finds_a_higher_claim_yields_everywhere():
    leadership = looking_for(*BOTH)
    drive(leadership, FIRST)
    find(leadership, SECOND, 2)
    verdicts = leadership.ended(SECOND, errors.TermSupersededError(OTHER), 1.0, 0.5)
    detached, displaced, end = verdicts
    assert detached == Detached(SECOND, "z:1 (term 7) drives it", was_driven=False, holder=OTHER)
    assert displaced == Displaced(OTHER)
    assert (end.address, type(end.error)) == (FIRST, errors.StandingByError)
    assert (leadership.claim.term, leadership.is_acting, leadership.awaited.is_empty) == (8, False, False)
    assert leadership.readiness(nobody_drains) == Readiness(ServingStatus.STANDBY, OTHER)
    assert not leadership.claim.takes_over(FIRST)


@pytest.mark.parametrize(
    ("holder", "is_believed"),
    [
        (Claim(1, "scheduler-a"), False),  # below (1, scheduler-m)
        (Claim(1, "scheduler-m"), False),
        (Claim(1, "scheduler-z"), True),
        (Claim(2, "scheduler-a"), True),
        (Claim(0, "scheduler-z"), False),
        (Claim(1 + MAX_RISE, "scheduler-z"), True),
        (Claim(2 + MAX_RISE, "scheduler-z"), False),
        (Claim(MAX_TERM, "scheduler-z"), False),
    ],
)
def test_superseded_is_believed_by_a_claim_above_the_one_that_was_refused(holder, is_believed):
    leadership = looking_for(*BOTH)
    drive(leadership, FIRST)
    find(leadership, SECOND, 2)
    verdicts = leadership.ended(SECOND, errors.TermSupersededError(holder), 1.0, 0.5)
    assert (Displaced(holder) in verdicts) == is_believed
    assert leadership.is_acting != is_believed
    assert (leadership[SECOND].phase is LinkPhase.LOST) != is_believed


def test_what_several_executors_say_of_one_scheduler_is_one_displacement():
    leadership = looking_for(*BOTH)
    for number, address in enumerate(BOTH, 1):
        find(leadership, address, number)
    leadership.ended(FIRST, errors.TermSupersededError(OTHER), 1.0, 0.5)
    assert leadership.ended(SECOND, errors.TermSupersededError(OTHER), 1.0, 0.5) == (
        Detached(SECOND, "z:1 (term 7) drives it", was_driven=False, holder=OTHER),
    )
    assert leadership.claim.term == 8


def test_one_executor_is_heeded_again_after_a_rest_or_a_welcome():
    """It cannot be told from one that makes claims up."""
    leadership = looking_for(*BOTH)
    refused = []
    for number in range(400):
        now_s = number / 10
        if leadership[SECOND].hello is None:
            find(leadership, SECOND, 2, holder="z", now_s=now_s)
        above = Claim(leadership.claim.term + 1, "scheduler-z")
        leadership.ended(SECOND, errors.TermSupersededError(above), now_s, 0.5)
        if leadership.claim.term > above.term:
            refused.append(now_s)
    assert refused == [0.0, 5.0, 15.0, 35.0]


def test_a_stand_in_line_gives_back_what_was_driven():
    leadership = looking_for(*BOTH)
    drive(leadership, FIRST)
    drive(leadership, SECOND, 2)
    leadership.ended(SECOND, errors.StreamEndedError("cut"), 1.0, 0.5)
    find(leadership, SECOND, 3, now_s=1.1)
    assert leadership.in_line(SECOND, OTHER, 1.1) == (Lost(SECOND, was_serving=True), InLine(SECOND, OTHER))
    assert leadership.in_line(SECOND, OTHER, 1.2) == (), "told once"
    leadership.ended(FIRST, errors.StreamEndedError("cut"), 2.0, 0.5)
    assert leadership.advance(9.0) == (Lost(FIRST, was_serving=True), Displaced(OTHER))
    assert leadership.readiness(nobody_drains) == Readiness(ServingStatus.STANDBY, OTHER)


def test_a_notice_of_a_drain_is_kept_until_the_welcome_and_for_that_stream():
    leadership = looking_for(FIRST)
    find(leadership, FIRST)
    assert not leadership.drains(FIRST), "it is not ours yet"
    leadership.welcomed(description(FIRST, 1), 0)
    assert leadership[FIRST].is_drain_due
    assert leadership.drains(FIRST)
    leadership.ended(FIRST, errors.StreamEndedError("cut"), 2.0, 0.5)
    drive(leadership, FIRST, 2, now_s=2.1)
    assert not leadership[FIRST].is_drain_due


ENDS = st.sampled_from(
    [
        errors.StreamEndedError("cut"),
        errors.UnreachableError("refused"),
        errors.ProtocolMismatchError("old"),
        errors.StreamEndedError("silent"),
    ]
)
ADDRESSES = st.sampled_from(["executor:1", "executor:2", "executor:3"])
TERMS = st.one_of(st.integers(0, 40), st.sampled_from([MAX_RISE, MAX_TERM - 1, MAX_TERM, 2**63, 2**64 - 1]))
HOLDERS = st.builds(Claim, TERMS, st.sampled_from(["scheduler-a", "scheduler-z"]))


class Whatever(RuleBasedStateMachine):
    """Executors that say anything, lies too, at any time; streams that end in any way."""

    @initialize(approach=st.sampled_from(Approach))
    def look(self, approach):
        """Three executors there are."""
        self.now_s = 0.0
        self.addresses = ["executor:1", "executor:2", "executor:3"]
        self.leadership = looking_for(*self.addresses, approach=approach)
        self.highest_term = self.leadership.claim.term
        self.may_act = False
        self.awaited = set(self.addresses)
        self.is_lost = set()
        self.ending = {}  # streams that have to end, and why

    def take(self, verdicts):
        """Carry out verdicts, and check that each loss is told once."""
        for verdict in verdicts:
            match verdict:
                case Lost(address):
                    assert address not in self.is_lost
                    self.is_lost.add(address)
                    self.awaited.discard(address)
                case InLine(address):
                    self.is_lost.discard(address)
                case Displaced():
                    assert self.may_act
                    self.may_act = False
                    self.is_lost.clear()
                    self.awaited = set(self.addresses)
                case EndStream(address, error):
                    self.ending[address] = error
                    if isinstance(error, errors.StandingByError):
                        self.is_lost.discard(address)

    def end(self, address, error):
        """End a stream; the reason that leadership gave counts before any other."""
        was_refused = isinstance(error, errors.TermSupersededError)
        before = self.leadership.claim.term
        self.take(self.leadership.ended(address, self.ending.pop(address, error), self.now_s, 0.5))
        if was_refused and self.leadership.claim.term > before:
            self.is_lost.clear()

    @rule(address=ADDRESSES, incarnation=st.integers(1, 4), term=TERMS, holder=st.sampled_from(["", "scheduler-z"]))
    def find(self, address, incarnation, term, holder):
        if self.leadership[address].hello is not None:
            return
        try:
            greeting = self.leadership.found(address, ExecutorInfo(incarnation, term, holder), self.now_s, 0.5)
        except errors.LinkError as error:
            self.end(address, error)
            return
        if greeting is not None:
            told, own = greeting.hello.claim.term, self.leadership.claim.term
            assert told == own or MAX_TERM >= told > max(own, term)
            self.take(greeting.verdicts)

    @rule(address=ADDRESSES, holder=HOLDERS)
    def wait(self, address, holder):
        if self.leadership[address].hello is None or address in self.ending:
            return
        try:
            self.take(self.leadership.in_line(address, holder, self.now_s))
        except errors.LinkError as error:
            self.end(address, error)

    @rule(address=ADDRESSES)
    def welcome(self, address):
        record = self.leadership[address]
        if record.hello is None or address in self.ending:
            return
        self.leadership.welcomed(description(address, record.incarnation), self.now_s)
        self.may_act = True
        self.is_lost.discard(address)
        self.awaited.discard(address)

    @rule(address=ADDRESSES, error=ENDS)
    def cut(self, address, error):
        """Its stream ends, or the attempt to open one."""
        self.end(address, error)

    @rule(address=ADDRESSES, holder=HOLDERS)
    def refuse(self, address, holder):
        """It ends the stream in favour of another scheduler."""
        if self.leadership[address].hello is not None:
            self.end(address, errors.TermSupersededError(holder))

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 2.0, 10.0]))
    def pass_time(self, seconds):
        self.now_s += seconds
        self.take(self.leadership.advance(self.now_s))

    @precondition(lambda self: self.ending)
    @rule(data=st.data())
    def end_as_told(self, data):
        """A stream ends as leadership wants it."""
        self.end(data.draw(st.sampled_from(sorted(self.ending))), None)

    @invariant()
    def the_term_never_falls(self):
        """And stays one above which others can rise."""
        assert self.highest_term <= self.leadership.claim.term <= MAX_TERM
        self.highest_term = self.leadership.claim.term

    @invariant()
    def one_incarnation_has_one_stream(self):
        """Whatever its addresses are."""
        records = [self.leadership[address] for address in self.addresses]
        open_to = [record.incarnation for record in records if record.hello is not None]
        assert len(open_to) == len(set(open_to))

    @invariant()
    def it_acts_from_a_welcome_until_it_is_displaced(self):
        """Not a moment longer."""
        assert not self.leadership.is_acting or self.may_act

    @invariant()
    def nothing_is_admitted_before_word_of_every_executor(self):
        """Word is a welcome or a loss, since the start or the last displacement."""
        assert not self.leadership.awaited.is_empty or not self.awaited

    @invariant()
    def what_is_lost_has_been_told(self):
        """And nothing else."""
        lost = {address for address in self.addresses if self.leadership[address].phase is LinkPhase.LOST}
        assert lost <= self.is_lost


Whatever.TestCase.settings = settings(stateful_step_count=60, deadline=None)
TestWhatever = Whatever.TestCase
