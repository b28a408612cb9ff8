"""What the core says of requests is what then happens."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness, running
from paceline.plan.values import FinishReason, StepPoint
from paceline_scheduler.core.answers import RequestState
from paceline_scheduler.core.events import EndCompletion, StreamEnded
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.queue.listing import Selection
from paceline_scheduler.errors import QueueFullError, UnknownRequestError
from scheduler_rig.requests import make_request


def test_a_running_request_names_its_executor_and_how_far_it_is():
    """Two results have arrived: the prompt is computed and two tokens are known."""
    request = make_request(5, 9)
    harness = running(request)
    harness.step()
    explanation = harness.explain(request)
    assert explanation.state is RequestState.RUNNING
    assert (explanation.executor, explanation.waiting_for, explanation.queue_position) == ("executor-0", "", 0)
    assert (explanation.num_computed_tokens, explanation.num_output_tokens) == (6, 2)


def test_a_waiting_request_names_its_position_and_what_the_first_in_line_waits_for():
    requests = [make_request(3, 9) for _ in range(3)]
    harness = running(*requests, on=make_executor(max_num_rows=1))
    second, third = (harness.explain(request) for request in requests[1:])
    assert (second.state, second.queue_position) == (RequestState.WAITING, 0)
    assert second.waiting_for == "every row of executor-0 is taken (1)"
    assert third.queue_position == 1
    assert third.waiting_for.startswith("1 request is ahead; for the first of them: every row")


@pytest.mark.parametrize(
    ("pool", "runs", "waits", "sentence"),
    [
        (8, (15, 4), (20, 1), "executor-0 needs 6 free blocks, 1 of them for running requests; 4 of 8 are free"),
        (16, (8, 50), (8, 50), "running requests of executor-0 are expected to need all 16 blocks"),
    ],
)
def test_a_request_without_room_in_the_pool_says_how_much_is_missing(pool, runs, waits, sentence):
    harness = running(make_request(*runs), on=make_executor(num_blocks=pool))
    request = make_request(*waits)
    harness.submit(request)
    assert sentence in harness.explain(request).waiting_for


def test_a_request_waits_for_executors_by_name():
    harness = CoreHarness(make_executor(), make_executor(incarnation=2))
    request = make_request(3, 3)
    harness.submit(request)
    harness.feed(StreamEnded("executor-0"))
    harness.drain("executor-1")
    assert harness.explain(request).waiting_for == "executor-0 has to attach; executor-1 is being drained"


def test_a_preempted_request_says_why_and_how_often():
    harness = CoreHarness(make_executor(num_blocks=8))
    harness.expect_short_outputs()
    requests = [make_request(8, 20), make_request(8, 20)]
    harness.submit(*requests)
    harness.step()
    harness.step_until_preempted()
    explanation = harness.explain(requests[1])
    assert (explanation.state, explanation.num_preemptions) == (RequestState.PREEMPTED, 1)
    assert "all 8 blocks of executor-0 were taken" in explanation.preemption_reason
    assert explanation.num_output_tokens > 0


def test_what_has_left_is_unknown():
    request = make_request(3, 1)
    harness = running(request, steps=0)
    harness.finish()
    with pytest.raises(UnknownRequestError):
        harness.explain(request)


class TimedHarness(CoreHarness):
    """One executor whose steps take the time that its warm-up measured: 5 ms and 1 ms per token."""

    def __init__(self, **limits):
        points = (StepPoint(1, 6_000_000), StepPoint(512, 517_000_000))
        executor = make_executor(
            step_points=points, num_blocks=2048, max_num_rows=16, max_num_batched_tokens=512, max_model_len=2048
        )
        super().__init__(executor, limits=CoreLimits(**limits))
        self.planned = deque()

    def pass_planned_step(self):
        """Let the oldest step run and the time pass that it takes, and send as many plans as the executor gets."""
        if self.planned:
            self.run()
            self._pass_time_of(self.planned.popleft())
            self.complete()
        while (plan := self.plan()) is not None:
            self.planned.append(plan)

    def pass_step(self):
        """Run one step, and let the time pass that it takes."""
        plan = self.step()
        assert plan is not None
        self._pass_time_of(plan)

    def _pass_time_of(self, plan):
        self.clock.advance(0.005 + 0.001 * plan.num_tokens if plan.num_tokens else 0.0)

    def measured(self, request):
        """Submit a request and return when its first token came, and the mean time between its tokens."""
        start = self.clock()
        self.submit(request)
        while not self.client.token_ids.get(request.handle):
            self.pass_step()
        first = self.clock()
        while request.handle not in self.client.finishes:
            self.pass_step()
        return first - start, (self.clock() - first) / (len(self.client.token_ids[request.handle]) - 1)


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "num_prompt"), [(0, 0, 40), (0, 0, 1500), (8, 0, 300), (4, 6, 200), (16, 6, 100)]
)
def test_an_estimate_comes_true(num_running, num_waiting, num_prompt):
    """Time to the first token within a third, time between tokens within a half: of an empty, a busy, a full system."""
    harness = TimedHarness()
    harness.submit(*(make_request(8, 60) for _ in range(num_running)))
    for _ in range(8):
        if num_running:
            harness.pass_step()
    harness.submit(*(make_request(150, 60) for _ in range(num_waiting)))
    request = make_request(num_prompt, 30)
    estimate = harness.views.estimate(request, harness.clock())
    first_s, between_s = harness.measured(request)
    assert estimate.refusal is None
    assert estimate.time_to_first_token_s == pytest.approx(first_s, rel=0.34)
    assert estimate.inter_token_s == pytest.approx(between_s, rel=0.5)


def test_an_estimate_knows_how_long_those_ahead_may_become_at_most():
    """Ten of two tokens are ahead on one row, or ten that do not say: these are taken to be as long as outputs are."""

    def first_token_s(max_tokens):
        harness = running(*(make_request(4, max_tokens) for _ in range(11)), on=make_executor(max_num_rows=1), steps=0)
        harness.plan()
        return harness.views.estimate(make_request(4, 2), harness.clock()).time_to_first_token_s

    assert first_token_s(2) < first_token_s(64) / 5
    assert first_token_s(64) < first_token_s(None) * 0.6


def test_an_estimate_counts_the_steps_that_are_planned_already():
    harness = TimedHarness()
    harness.submit(make_request(8, 200))
    for _ in range(8):
        harness.pass_planned_step()
    request = make_request(4, 2)
    estimate, start = harness.views.estimate(request, harness.clock()), harness.clock()
    harness.submit(request)
    while not harness.client.token_ids.get(request.handle):
        harness.pass_planned_step()
    assert estimate.time_to_first_token_s == pytest.approx(harness.clock() - start, rel=0.1)


def test_an_estimate_knows_the_prefix_cache():
    harness = TimedHarness()
    prompt = [token % 900 for token in range(1200)]
    harness.measured(make_request(prompt, 2))
    request = make_request(prompt, 2)
    estimate = harness.views.estimate(request, harness.clock())
    assert (estimate.num_prompt_tokens, estimate.num_cached_tokens) == (1200, 1196)
    assert estimate.time_to_first_token_s == pytest.approx(harness.measured(request)[0], rel=0.34)


def test_an_estimate_names_the_refusal():
    harness = TimedHarness(max_num_queued_reqs=1)
    harness.submit(make_request(8, 4))
    estimate = harness.views.estimate(make_request(8, 4), harness.clock())
    assert isinstance(estimate.refusal, QueueFullError)
    assert harness.views.num_waiting()[0] == 1


def executor_of(num_rows, *, num_blocks=4096, max_model_len=1024):
    """Return an executor whose steps take 10 ms."""
    points = (StepPoint(1, 10_000_000), StepPoint(64, 12_000_000))
    return make_executor(
        step_points=points,
        num_blocks=num_blocks,
        max_num_rows=num_rows,
        max_num_batched_tokens=256,
        max_model_len=max_model_len,
    )


def test_a_burst_beside_one_running_request_is_not_refused():
    """63 rows are free: rounds are counted over all rows, not over those that run."""
    harness = CoreHarness(executor_of(64))
    harness.submit(make_request(3, 400))
    harness.step()
    harness.submit(*(make_request(3, 400) for _ in range(256)))
    assert harness.views.num_waiting()[0] == 256


def test_a_burst_that_no_row_will_be_free_for_is_refused_although_nothing_runs_yet():
    """Four rows and a budget of two seconds: nobody would get a token in time behind dozens of others."""
    harness = CoreHarness(executor_of(4), limits=CoreLimits(ttft_budget_s=2.0))
    with pytest.raises(QueueFullError):
        harness.submit(*(make_request(3, 400) for _ in range(500)))
    assert harness.views.num_waiting()[0] < 16


def test_an_executor_that_can_never_hold_a_request_promises_it_nothing():
    points = (StepPoint(1, 20_000_000), StepPoint(64, 650_000_000))
    small, large = (
        make_executor(step_points=points, num_blocks=count, max_model_len=2048, incarnation=count) for count in (8, 512)
    )
    harness = CoreHarness(small, large)
    harness.submit(make_request(1500, 4))
    harness.step("executor-0")
    harness.step("executor-1")
    assert harness.views.estimate(make_request(60, 4), 0.0).time_to_first_token_s > 10


# Lists of requests: all of them, once each, and of each what an explanation says


def pages(harness, at_most, meanwhile=lambda: None, **selection):
    """Ask for page after page; `meanwhile` happens between two."""
    found, after = [], 0
    while after is not None:
        page = harness.views.listed(Selection(after=after, at_most=at_most, **selection), harness.clock())
        assert len(page.requests) <= at_most
        found += page.requests
        after = page.next_after
        meanwhile()
    return found


def busy_harness(num_rows, tenants, num_steps):
    """A system in which some requests run and others wait."""
    requests = [make_request(3, 40, tenant=tenant) for tenant in tenants]
    harness = running(*requests, on=make_executor(max_num_rows=num_rows), steps=0)
    harness.steps(num_steps)
    return harness, requests


@given(
    num_rows=st.integers(1, 4),
    tenants=st.lists(st.sampled_from("ab"), min_size=1, max_size=12),
    num_steps=st.integers(0, 4),
    at_most=st.integers(1, 5),
)
def test_pages_hold_every_request_once_as_it_is_explained(num_rows, tenants, num_steps, at_most):
    harness, requests = busy_harness(num_rows, tenants, num_steps)
    found = pages(harness, at_most)
    assert [listed.key for listed in found] == [request.key for request in requests]
    for listed in found:
        assert listed.explanation == harness.views.explain(listed.key, harness.clock())
    for tenant in "ab":
        of_tenant = [listed for listed in found if listed.key.tenant == tenant]
        assert pages(harness, at_most, tenant=tenant) == of_tenant
    for state in RequestState:
        in_state = [listed for listed in found if listed.explanation.state is state]
        assert pages(harness, at_most, states=frozenset({state})) == in_state


def test_what_comes_and_goes_between_two_pages_moves_no_other():
    """One of the first page ends, two arrive: all that were there all the time are listed once."""
    harness, requests = busy_harness(2, "aaaa", 1)
    newer = [make_request(3, 4), make_request(3, 4)]

    def change():
        if harness.views.num_unfinished() == len(requests):
            harness.feed(EndCompletion(requests[0].handle, 0, FinishReason.CANCELLED))
            harness.submit(*newer)

    found = [listed.key for listed in pages(harness, 2, change)]
    assert found == [request.key for request in (*requests, *newer)]


def test_a_request_without_a_listener_and_with_a_deadline_says_so():
    harness, _ = busy_harness(1, "a", 0)
    harness.submit(make_request(3, 4, deadline_s=60.0))
    harness.clock.advance(1.5)
    first, second = pages(harness, 10)
    assert (first.age_s, first.time_left_s, first.has_listener) == (1.5, None, True)
    assert (second.age_s, second.time_left_s, second.max_tokens) == (1.5, 58.5, 4)
