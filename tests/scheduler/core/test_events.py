"""The one door into the core: what is refused changes nothing, and deciding changes nothing."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import RecordId
from paceline_scheduler import errors
from paceline_scheduler.core import events
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning.planner import decide
from paceline_scheduler.core.request import ResumePoint
from scheduler_rig.fingerprint import fingerprint
from scheduler_rig.requests import column, make_request

FIRST, SECOND = "executor-0", "executor-1"
RUNNING = make_request(3, 30, handle=1, request_id="runs", is_resumable=True, attachment=2)
ABANDONED = make_request(3, 30, handle=2, request_id="abandoned", is_resumable=True)


@pytest.fixture
def harness():
    """Two rows, one running request, one waiting whose client is away, room for two more in the queue."""
    harness = CoreHarness(make_executor(max_num_rows=1), limits=CoreLimits(max_num_queued_reqs=3))
    harness.submit(RUNNING, ABANDONED)
    harness.detach(ABANDONED)
    harness.step()
    harness.run_ahead()
    return harness


def again(request, attachment, held=(), **changes):
    """The client of a request comes back."""
    point = ResumePoint(len(held), rolling_hash(HASH_START, np.array(held, dtype=np.int32)))
    return replace(request, handle=90 + attachment, attachment=attachment, point=point, **changes)


def siblings(*numbers):
    """Requests of which there is room for two."""
    return tuple(make_request(3, 4, handle=50 + number, request_id=f"new-{number}") for number in numbers)


def due(harness, **changes):
    """The result that is due next, changed."""
    return replace(harness.results[FIRST][0], **changes)


REFUSED = {
    "an id in use": (lambda _: events.Submit((replace(RUNNING, handle=9),)), errors.DuplicateRequestError),
    "an id twice": (lambda _: events.Submit((*siblings(1), *siblings(1))), errors.DuplicateRequestError),
    "a model that nobody has": (lambda _: events.Submit((make_request(model="other"),)), errors.UnknownModelError),
    "too many tokens": (lambda _: events.Submit((make_request(3, 10_000),)), errors.InvalidRequestError),
    "the last of a group finds no place": (lambda _: events.Submit(siblings(1, 2, 3)), errors.QueueFullError),
    "an id is used again in a group that finds no place": (
        lambda _: events.Submit((replace(ABANDONED, handle=9, body_digest=b"new"), *siblings(1, 2, 3))),
        errors.QueueFullError,
    ),
    "an older attachment": (lambda _: events.Resume((again(RUNNING, 1),)), errors.StaleAttachmentError),
    "another body": (lambda _: events.Resume((again(RUNNING, 3, body_digest=b"other"),)), errors.ResumeMismatchError),
    "tokens that nobody knows": (
        lambda _: events.Resume((again(siblings(1)[0], 2, (7, 8)),)),
        errors.ResumeMismatchError,
    ),
    "a group of which one is refused": (
        lambda _: events.Resume((again(ABANDONED, 5), *siblings(1, 2, 3))),
        errors.QueueFullError,
    ),
    "a cancel of what is not there": (lambda _: events.Cancel(RecordId("", "nobody's")), errors.UnknownRequestError),
    "a cancel by another tenant": (lambda _: events.Cancel(RecordId("thief", "runs")), errors.UnknownRequestError),
    "a drain of what is not there": (lambda _: events.DrainExecutor("nobody:1"), errors.NoExecutorError),
    "an end of the drain of what is not there": (lambda _: events.UndrainExecutor("nobody:1"), errors.NoExecutorError),
    "a result of nobody": (lambda h: events.StepFinished("nobody:1", due(h)), errors.DivergenceError),
    "a result of another epoch": (lambda h: events.StepFinished(FIRST, due(h, epoch=99)), errors.DivergenceError),
    "a result of another process": (
        lambda h: events.StepFinished(FIRST, due(h, incarnation=99)),
        errors.DivergenceError,
    ),
    "a result of another step": (lambda h: events.StepFinished(FIRST, due(h, step_id=99)), errors.DivergenceError),
    "a result with other blocks": (lambda h: events.StepFinished(FIRST, due(h, grant_hash=1)), errors.DivergenceError),
    "a result of more rows": (
        lambda h: events.StepFinished(FIRST, due(h, num_accepted=column(1, 1))),
        errors.DivergenceError,
    ),
    "a result with too few tokens": (
        lambda h: events.StepFinished(FIRST, due(h, token_ids=np.zeros(0, dtype=np.int32))),
        errors.DivergenceError,
    ),
}


@pytest.mark.parametrize(("make_event", "error"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_has_changed_nothing(harness, make_event, error):
    """Not even what is refused for the last of many reasons, or the last of many requests."""
    event, before = make_event(harness), fingerprint(harness.core)
    with pytest.raises(error):
        harness.feed(event)
    assert fingerprint(harness.core) == before


def test_a_core_that_drains_takes_nothing_and_changes_nothing(harness):
    """Neither what is new nor what comes back; a drain outlives a new beginning."""
    harness.feed(events.BeginDrain())
    before = fingerprint(harness.core)
    for event in (events.Submit(siblings(1)), events.Resume((again(RUNNING, 3),))):
        with pytest.raises(errors.DrainingError):
            harness.feed(event)
    assert fingerprint(harness.core) == before
    harness.feed(events.BeginAnew("over", None, ()))
    assert harness.views.is_draining


def test_a_result_that_comes_twice_is_taken_once(harness):
    result = due(harness)
    harness.complete()
    before = fingerprint(harness.core)
    with pytest.raises(errors.DivergenceError):
        harness.feed(events.StepFinished(FIRST, result))
    assert fingerprint(harness.core) == before


def test_a_result_of_an_executor_whose_stream_ended_changes_nothing(harness):
    """It may have been given to another scheduler since."""
    event = events.StepFinished(FIRST, due(harness))
    harness.feed(events.StreamEnded(FIRST))
    before = fingerprint(harness.core)
    with pytest.raises(errors.DivergenceError):
        harness.feed(event)
    assert fingerprint(harness.core) == before


def test_views_change_nothing(harness):
    views, before = harness.views, fingerprint(harness.core)
    for request in (RUNNING, ABANDONED):
        views.explain(request.key, harness.clock())
        assert views.known(request.key, request.body_digest, request.model) is not None
    views.estimate(make_request(5, 5), harness.clock())
    views.estimate(make_request(5, 10_000, deadline_s=0.0), harness.clock())
    views.require_time("simulated", harness.clock())
    with pytest.raises(errors.QueueFullError):
        views.require_room(4, "", harness.clock())
    views.limits()
    views.counts(FIRST)
    views.description(FIRST)
    views.due_step(FIRST)
    views.check()
    assert fingerprint(harness.core) == before


# Deciding

OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 12)),
    st.tuples(
        st.sampled_from(["plan", "run", "complete", "die", "drain", "undrain", "wait"]), st.integers(0, 1), st.just(0)
    ),
)


def disturb(harness, name, number, other):
    """Bring the core into another state."""
    address = [*harness.executors][number % len(harness.executors)] if name != "submit" else FIRST
    match name:
        case "submit":
            with contextlib.suppress(errors.RequestRefusedError):
                harness.submit(make_request([number % 5] * number, other))
        case "die":
            harness.die(address)
        case "drain":
            harness.drain(address)
        case "undrain":
            harness.feed(events.UndrainExecutor(address))
        case "wait":
            harness.clock.advance(0.3)
        case _:
            getattr(harness, name)(address)


def decided(core, address, now):
    """What would be done on an executor now."""
    state = core._state
    executor = state.executors.by_address[address]
    queue = state.waiting.of_model(executor.description.model)
    return decide(executor.view(), state.executors.waiting_for(executor, queue, state.limits, now, {}), state.limits)


@pytest.mark.parametrize("num_executors", [1, 2])
@given(operations=st.lists(OPERATIONS, max_size=30))
@settings(max_examples=settings.default.max_examples // 2, deadline=None)
def test_deciding_twice_is_deciding_once(num_executors, operations):
    """The same decision, from the same state, which is the same after it: only what is carried out changes it."""
    harness = CoreHarness(
        *(make_executor(incarnation=1000 * n, max_num_rows=3, num_blocks=24) for n in range(1, num_executors + 1))
    )
    for operation in operations:
        disturb(harness, *operation)
        for address in harness.executors:
            before = fingerprint(harness.core)
            first, second = (fingerprint(decided(harness.core, address, harness.clock())) for _ in range(2))
            assert first == second
            assert fingerprint(harness.core) == before


def test_whom_a_plan_leaves_to_another_executor_is_written_down_when_it_is_made():
    harness = CoreHarness(make_executor(), make_executor(incarnation=1000))
    shared = [7] * 40
    harness.submit(make_request(shared, 30))
    harness.step(FIRST)
    harness.steps(4, FIRST)
    harness.submit(make_request([*shared, 9], 4))
    (waiting,) = harness.views.waiting_requests()
    harness.clock.advance(1.0)
    assert decided(harness.core, SECOND, harness.clock()).work.left_to_others == [waiting]
    assert waiting.left is None
    assert harness.core.plan(SECOND, harness.clock()) is None
    assert waiting.left.since_s == harness.clock()
