"""Where the time of a request goes: what clients, operators and successors are told of it."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import FinishReason
from paceline_scheduler.core.events import StreamEnded
from paceline_scheduler.core.phases import PhaseTimes
from scheduler_rig.requests import make_request


class Diary:
    """An implementation of its own: what happens to each request is written down as plans and outputs go by."""

    def __init__(self, harness):
        self.harness = harness
        self.entries = {}  # by handle: (time, phase) from the submission on
        self.rows = {}  # by address and row: the handle

    def write(self, handle, phase):
        self.entries[handle].append((self.harness.clock(), phase))

    def now_in(self, handle):
        return self.entries[handle][-1][1]

    def planned(self, address, plan):
        for release in plan.releases:
            handle = self.rows.pop((address, release.row), None)
            if release.final is None and handle not in self.harness.client.ended:
                self.write(handle, "preempted")
        for new in plan.new_requests:
            self.rows[address, new.row] = new.request.handle
            self.write(new.request.handle, "prefill")

    def finished(self, before):
        """Note who has got tokens since, and who ended."""
        for handle, tokens in self.harness.client.token_ids.items():
            if len(tokens) > before.get(handle, 0) and self.now_in(handle) == "prefill":
                self.write(handle, "decode")
        for handle in self.harness.client.ended:
            if self.now_in(handle) != "over":
                self.write(handle, "over")

    def lost(self, address):
        for place in [place for place in self.rows if place[0] == address]:
            handle = self.rows.pop(place)
            if self.now_in(handle) not in ("over", "preempted"):
                self.write(handle, "preempted")

    def times(self, handle):
        sums = {"queued": 0.0, "prefill": 0.0, "decode": 0.0, "preempted": 0.0}
        entries = self.entries[handle]
        for (start_s, phase), (end_s, _) in itertools.pairwise(entries):
            sums[phase] += end_s - start_s
        return tuple(sums.values())


def told(times):
    return times.queued_s, times.prefill_s, times.decode_s, times.preempted_s


def lengths(harness):
    return {handle: len(tokens) for handle, tokens in harness.client.token_ids.items()}


def move(harness, diary, action):
    """Do one thing on the first executor, or lose it and attach it again."""
    if action == "plan":
        plan = harness.plan()
        if plan is not None:
            diary.planned("executor-0", plan)
    elif action == "lose":
        harness.lose()
        diary.lost("executor-0")
        harness.executors["executor-0"].restart()
        harness.attach()
    else:
        harness.run()
        before = lengths(harness)
        harness.complete()
        diary.finished(before)


@settings(max_examples=settings.default.max_examples // 4)
@given(
    st.lists(st.tuples(st.sampled_from(["plan", "result", "result", "plan", "lose"]), st.integers(0, 50)), max_size=60)
)
def test_times_are_what_a_diary_of_plans_and_outputs_says(moves):
    harness = CoreHarness(make_executor(num_blocks=10, max_num_rows=4))
    diary = Diary(harness)
    requests = [make_request(3 + index, 10 + 3 * index, handle=index + 1) for index in range(5)]
    for request in requests:
        diary.entries[request.handle] = []
        diary.write(request.handle, "queued")
    harness.submit(*requests)
    for action, milliseconds in moves:
        harness.clock.advance(milliseconds / 1000)
        harness.expect_short_outputs()
        move(harness, diary, action)
    while len(harness.client.ended) < len(requests):
        harness.clock.advance(0.007)
        move(harness, diary, "plan")
        move(harness, diary, "result")
    for request in requests:
        handle = request.handle
        if handle in harness.client.finishes:
            assert told(harness.client.finishes[handle].times) == pytest.approx(diary.times(handle))


def submitted(harness, **changes):
    request = replace(make_request(4, 3, handle=1, is_resumable=True), **changes)
    harness.submit(request)
    return request


def step(harness, seconds):
    """Let a step take so long."""
    harness.plan()
    harness.clock.advance(seconds)
    harness.run()
    harness.complete()


def test_phases_add_up_to_the_time_since_the_submission():
    harness = CoreHarness(make_executor())
    request = submitted(harness)
    harness.clock.advance(0.5)
    step(harness, 0.25)
    assert harness.explain(request).times == PhaseTimes(0.5, 0.25, 0.0, 0.0)
    step(harness, 0.125)
    step(harness, 0.125)
    assert harness.client.finishes[1].times == PhaseTimes(0.5, 0.25, 0.25, 0.0)


def test_what_a_request_has_waited_elsewhere_is_queued():
    harness = CoreHarness(make_executor())
    submitted(harness, waited_s=90.0, attachment=2)
    for _ in range(3):
        step(harness, 1.0)
    assert harness.client.finishes[1].times.queued_s == pytest.approx(90.0)


def test_a_stream_that_breaks_takes_no_row_away():
    harness = CoreHarness(make_executor())
    submitted(harness)
    step(harness, 1.0)
    harness.feed(StreamEnded("executor-0"))
    harness.clock.advance(2.0)
    harness.attach()
    step(harness, 1.0)
    step(harness, 1.0)
    assert harness.client.finishes[1].times == PhaseTimes(0.0, 1.0, 4.0, 0.0)


def test_a_successor_goes_on_where_the_request_was_placed():
    """What passed since then it learns from the client; as long as that says nothing it tells no times."""
    harness = CoreHarness(make_executor())
    request = submitted(harness)
    harness.clock.advance(0.5)
    step(harness, 0.25)
    harness.succeed()
    harness.clock.advance(1.0)
    harness.resume(replace(request, attachment=2, waited_s=3.0))
    step(harness, 0.5)
    step(harness, 0.5)
    times = harness.client.finishes[1].times
    assert times.queued_s == 0.5
    assert told(times) == pytest.approx((0.5, 0.0, 3.5, 0.0)), "4 s in all"


def test_a_successor_that_nobody_tells_of_the_time_between_tells_no_times():
    """It would be too little."""
    harness = CoreHarness(make_executor())
    request = submitted(harness)
    step(harness, 0.25)
    harness.succeed()
    harness.resume(replace(request, attachment=2))
    step(harness, 0.5)
    step(harness, 0.5)
    assert harness.client.finishes[1].reason is FinishReason.LENGTH
    assert harness.client.finishes[1].times is None


def test_outputs_say_how_long_tokens_took():
    """The first since the submission, the others since the one before; a preemption in between counts."""
    harness = CoreHarness(make_executor())
    seen = []
    harness.client.deliver = lambda tokens, _: seen.extend(tokens)
    submitted(harness)
    harness.clock.advance(0.5)
    for seconds in (0.25, 0.125, 0.5):
        step(harness, seconds)
    assert [tokens.first_tokens_s for tokens in seen] == [{1: 0.75}, {}, {}]
    first, *others = (tokens.intervals_s.tolist() for tokens in seen)
    assert math.isnan(first[0])
    assert others == [[0.125], [0.5]]
