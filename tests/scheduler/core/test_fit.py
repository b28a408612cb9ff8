"""Executors of different size: nothing runs where it could never end, and nothing waits for what will never come."""

from dataclasses import replace

import pytest

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import FinishReason
from paceline_scheduler.core.events import ExecutorRemoved, SetLimits
from paceline_scheduler.errors import InvalidRequestError, NoExecutorError, NoLongerServedError
from paceline_scheduler.testing.requests import make_request

SMALL, LARGE = "executor-0", "executor-1"


@pytest.mark.parametrize("small", [{"num_blocks": 8}, {"max_model_len": 40}], ids=["pool", "context"])
@pytest.mark.parametrize("num_prompt", [8, 60])
def test_a_request_runs_only_where_it_can_end(small, num_prompt):
    harness = CoreHarness(make_executor(**small), make_executor(incarnation=9))
    large, tiny = make_request(num_prompt, 100, handle=1), make_request(4, 4, handle=2)
    harness.submit(large, tiny)
    assert [placement.request.handle for placement in harness.plan(SMALL).new_requests] == [2]
    harness.finish()
    harness.assert_whole(large, tiny)


def test_without_max_tokens_a_request_gets_what_its_executor_allows():
    harness = CoreHarness(make_executor(max_model_len=16), make_executor(max_model_len=64, incarnation=9))
    harness.submit(make_request(10, None, handle=1))
    harness.plan(SMALL)
    harness.finish()
    assert harness.client.finishes[1].num_output_tokens == 6
    assert harness.client.finishes[1].reason == FinishReason.LENGTH


def test_without_max_tokens_a_prompt_still_has_to_fit():
    harness = CoreHarness(make_executor(max_model_len=16), make_executor(max_model_len=64, incarnation=9))
    harness.submit(make_request(16, None, handle=1))
    assert harness.plan(SMALL) is None
    harness.finish()
    assert harness.client.finishes[1].num_output_tokens == 48


def test_what_only_a_forgotten_executor_could_hold_fails():
    """Nobody waits for what is not expected back."""
    harness = CoreHarness(make_executor(num_blocks=8), make_executor(incarnation=9))
    harness.submit(make_request(100, 10, handle=1))
    harness.lose(LARGE)
    harness.feed(ExecutorRemoved(LARGE))
    assert isinstance(harness.client.failures[1], NoLongerServedError)
    assert "33 tokens" in str(harness.client.failures[1])
    assert harness.views.num_waiting() == (0, 0)


@pytest.mark.parametrize(
    ("restarted", "sentence"),
    [({"num_blocks": 20}, "hold at most 81 tokens"), ({"model": "other"}, "'simulated' are gone")],
    ids=["smaller", "another model"],
)
def test_an_executor_that_returns_as_another_one_fails_what_it_can_no_longer_hold(restarted, sentence):
    harness = CoreHarness(make_executor())
    harness.submit(make_request(100, 40, handle=1))
    harness.step()
    harness.lose()
    harness.executors["executor-0"] = make_executor(incarnation=7, **restarted)
    harness.attach()
    assert isinstance(harness.client.failures[1], NoLongerServedError)
    assert sentence in str(harness.client.failures[1])
    harness.views.check()
    assert harness.views.num_unfinished() == 0


def test_a_prompt_longer_than_the_queue_is_refused_for_good():
    """There is no time at which it would be taken."""
    harness = CoreHarness(make_executor())
    harness.feed(SetLimits(replace(harness.views.limits(), max_num_queued_tokens=10)))
    with pytest.raises(InvalidRequestError, match="has 11 tokens; the queue takes at most 10"):
        harness.submit(make_request(11))


def test_while_every_executor_drains_new_requests_are_refused_with_a_time_to_try_again():
    """None of them would place it."""
    harness = CoreHarness(make_executor())
    harness.drain()
    with pytest.raises(NoExecutorError, match="draining") as refusal:
        harness.submit(make_request())
    assert refusal.value.retry_after_s > 0
