"""Submission, ends and returns: what is refused, what is delivered, what survives a broken stream."""

from dataclasses import replace

import pytest

from both_sides.audited import expected_output, make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import FinishReason, RecordId
from paceline_executor.runner.interface import RowProblem
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import Cancel, ExecutorLost, StepFinished, StreamEnded, Submit, Tick
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.errors import (
    DeadlineExceededError,
    DivergenceError,
    InvalidRequestError,
    NoExecutorError,
    QueueFullError,
    UnknownModelError,
    UnknownRequestError,
)
from paceline_scheduler.testing.requests import make_request


def test_without_an_executor_a_request_is_refused_with_a_time_to_try_again():
    """Nobody can say what fits before the first executor attached."""
    with pytest.raises(NoExecutorError) as refusal:
        Core(CoreLimits()).apply(Submit((make_request(),)), 0.0)
    assert refusal.value.retry_after_s > 0


def test_a_model_nobody_serves_is_refused_by_name():
    with pytest.raises(UnknownModelError, match="'other'"):
        CoreHarness(make_executor()).submit(make_request(model="other"))


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field"),
    [(16, None, "prompt"), (17, 1, "prompt"), (10, 7, "stopping.max_tokens"), (10, 2**31 - 1, "stopping.max_tokens")],
)
def test_what_can_never_fit_the_context_is_refused(num_prompt, max_tokens, field):
    harness = CoreHarness(make_executor(max_model_len=16))
    with pytest.raises(InvalidRequestError) as refusal:
        harness.submit(make_request(num_prompt, max_tokens))
    assert refusal.value.field == field
    assert harness.views.num_waiting() == (0, 0)


def test_what_can_never_fit_the_pool_is_refused():
    """Four blocks of four hold 16 computed tokens: a prompt of 10 can get 7 more, the last of which is not computed."""
    harness = CoreHarness(make_executor(num_blocks=4))
    with pytest.raises(InvalidRequestError):
        harness.submit(make_request(10, 8))
    request = make_request(10, 7)
    harness.submit(request)
    harness.finish()
    assert tuple(harness.client.token_ids[request.handle]) == expected_output(request)


def test_an_unset_max_tokens_is_what_context_and_pool_allow():
    harness = CoreHarness(make_executor(max_model_len=16))
    harness.submit(make_request(10, None, handle=1))
    harness.finish()
    assert harness.client.finishes[1].num_output_tokens == 6
    assert harness.client.finishes[1].reason == FinishReason.LENGTH


def test_a_full_queue_refuses_with_a_time_to_try_again():
    harness = CoreHarness(make_executor(), limits=CoreLimits(max_num_queued_reqs=2, max_num_queued_tokens=10))
    harness.submit(make_request(4, handle=1))
    with pytest.raises(QueueFullError, match="tokens"):
        harness.submit(make_request(7))
    harness.submit(make_request(4, handle=2))
    with pytest.raises(QueueFullError, match="requests") as refusal:
        harness.submit(make_request(1))
    assert 0 < refusal.value.retry_after_s <= 30
    harness.finish()
    assert harness.client.ended == {1, 2}


def test_cancelling_gives_the_blocks_back_within_two_steps():
    harness = CoreHarness(make_executor())
    harness.submit(make_request(8, 50, handle=1, request_id="r"))
    harness.step()
    harness.feed(Cancel(RecordId("", "r")))
    assert harness.client.finishes[1].reason == FinishReason.CANCELLED
    harness.step()
    assert harness.views.counts("executor-0").blocks.used == 0


def test_another_tenants_request_is_unknown():
    harness = CoreHarness(make_executor())
    harness.submit(make_request(request_id="r", tenant="red"))
    with pytest.raises(UnknownRequestError):
        harness.feed(Cancel(RecordId("blue", "r")))


def test_a_stop_text_cuts_the_record():
    """The edge found a stop text at token 2 while token 3 was on its way: the executor's record ends at 2."""
    executor = make_executor()
    harness = CoreHarness(executor)
    request = make_request(3, 50, handle=1)
    harness.submit(request)
    for _ in range(3):
        harness.step()
    harness.end(request, 2)
    harness.finish()
    record = executor.records[request.key]
    assert record.released.num_output_tokens == 2
    assert record.released.reason == FinishReason.STOP
    assert 1 not in harness.client.ended, "the edge knows already"


def test_a_deadline_that_passes_fails_the_request_wherever_it_is():
    """Running or waiting: one failure, nothing later, blocks free."""
    harness = CoreHarness(make_executor(max_num_rows=1))
    harness.submit(make_request(3, 50, handle=1, deadline_s=5.0), make_request(3, 50, handle=2, deadline_s=6.0))
    harness.step()
    assert harness.wake_at == 5.0
    harness.clock.advance(7)
    harness.feed(Tick())
    assert {type(error) for error in harness.client.failures.values()} == {DeadlineExceededError}
    harness.finish()
    assert harness.client.ended == {1, 2}
    assert harness.wake_at is None
    assert harness.views.counts("executor-0").blocks.used == 0


def test_a_row_that_fails_alone_leaves_its_neighbours_running():
    """The error reaches its own client only."""
    executor = make_executor()
    harness = CoreHarness(executor)
    bad, good = make_request(3, 4, handle=1), make_request(3, 4, handle=2)
    harness.submit(bad, good)
    harness.step()
    executor.fail_row(bad.key, RowProblem.NOT_FINITE)
    harness.finish()
    assert "not finite numbers" in str(harness.client.failures[1])
    assert tuple(harness.client.token_ids[2]) == expected_output(good)


def test_a_broken_stream_loses_and_doubles_nothing():
    harness = CoreHarness(make_executor())
    request = make_request(5, 12, handle=1)
    harness.submit(request)
    harness.step()
    harness.plan()
    harness.run()  # the result is lost with the stream
    harness.feed(StreamEnded("executor-0"))
    harness.attach("executor-0")
    assert len(harness.client.token_ids[1]) == 2
    harness.finish()
    assert tuple(harness.client.token_ids[1]) == expected_output(request)
    assert harness.client.attempts[1] == 1


def test_an_executor_that_comes_back_empty_gets_its_requests_again():
    executor = make_executor()
    harness = CoreHarness(executor)
    request = make_request(5, 12, handle=1)
    harness.submit(request)
    for _ in range(4):
        harness.step()
    executor.restart()
    harness.attach("executor-0")
    harness.finish()
    assert tuple(harness.client.token_ids[1]) == expected_output(request)
    assert harness.client.attempts[1] == 2


def test_the_requests_of_a_lost_executor_continue_on_another_one():
    harness = CoreHarness(make_executor(), make_executor(incarnation=2))
    request = make_request(5, 12, handle=1)
    harness.submit(request)
    harness.step("executor-0")
    harness.feed(ExecutorLost("executor-0"))
    harness.step("executor-1")
    harness.attach("executor-0")
    harness.finish()
    assert tuple(harness.client.token_ids[1]) == expected_output(request)
    assert harness.views.counts("executor-0").blocks.used == 0


def test_the_prefix_cache_survives_a_broken_stream():
    harness = CoreHarness(make_executor())
    harness.submit(make_request(list(range(12)), 1, handle=1))
    harness.finish()
    harness.attach("executor-0")
    harness.submit(make_request(list(range(12)), 1, handle=2))
    harness.finish()
    assert harness.client.finishes[2].num_cached_tokens == 8


@pytest.mark.parametrize(
    "change",
    [{"epoch": 9}, {"incarnation": 9}, {"step_id": 2}, {"grant_hash": 1}, {"num_accepted": [1, 1]}],
    ids=lambda change: next(iter(change)),
)
def test_a_result_that_does_not_fit_its_plan_changes_nothing(change):
    """I5: it is refused as a divergence; the true one is still taken, once."""
    harness = CoreHarness(make_executor())
    harness.submit(make_request(3, 4, handle=1))
    harness.plan()
    harness.run()
    result = harness.results["executor-0"][0]
    with pytest.raises(DivergenceError):
        harness.feed(StepFinished("executor-0", replace(result, **change)))
    assert harness.client.token_ids == {}
    harness.complete()
    with pytest.raises(DivergenceError):
        harness.feed(StepFinished("executor-0", result))
    assert len(harness.client.token_ids[1]) == 1
