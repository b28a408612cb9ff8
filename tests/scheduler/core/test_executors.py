"""Several executors behind one queue: who gets a request, how one is emptied without a loss, what runs where."""

from dataclasses import replace

import pytest

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness, running
from paceline.plan.values import FinishReason, RecordId
from paceline_scheduler.core.events import DrainExecutor, ExecutorRemoved, SetLimits, StreamEnded, UndrainExecutor
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import MAX_LEFT_S
from paceline_scheduler.core.planning.forecast import load_of
from paceline_scheduler.errors import ExecutorLeavingError, InvalidRequestError, NoLongerServedError
from scheduler_rig.requests import make_request

FIRST, SECOND = "executor-0", "executor-1"
BOTH = (FIRST, SECOND)


def pair(**options):
    return CoreHarness(make_executor(**options), make_executor(incarnation=2, **options))


def begin_on_first(harness, *requests):
    """Let requests begin on the first of two executors."""
    harness.views.executor(SECOND).draining = True
    harness.submit(*requests)
    harness.step()
    harness.views.executor(SECOND).draining = False


def placed_by(harness, *addresses):
    """Let each of the executors plan a step, in this order; returns {handle: address} of what was placed."""
    placed = {}
    for address in addresses:
        plan = harness.step(address)
        placed |= {placement.request.handle: address for placement in (plan.new_requests if plan else ())}
    return placed


def test_a_request_goes_where_its_prefix_is():
    harness = pair(max_num_batched_tokens=256)
    prompt = list(range(120))
    harness.views.executor(FIRST).draining = True
    harness.submit(make_request(prompt, 1, handle=1))
    harness.finish()
    harness.views.executor(FIRST).draining = False
    harness.submit(make_request([*prompt, 7], 1, handle=2))
    assert placed_by(harness, *BOTH) == {2: SECOND}
    harness.finish()
    assert harness.client.finishes[2].num_cached_tokens == 120


def test_without_a_prefix_a_request_goes_where_less_is_to_do():
    harness = pair()
    begin_on_first(harness, *(make_request(2, 40) for _ in range(5)))
    harness.submit(make_request(2, 5, handle=1000))
    assert placed_by(harness, *BOTH) == {1000: SECOND}


def set_step_time(harness, address, base_ms, token_ms):
    """Let steps of an executor be known to take so long."""
    harness.views.executor(address).step_time._weights = [base_ms * 1e6, token_ms * 64e6, 0.0]


def test_a_request_goes_where_it_would_be_decoded_fastest_beside_what_runs_there():
    """Alone it is quickest on the first; of two rows the second would take less time."""
    harness = pair()
    set_step_time(harness, FIRST, 1.0, 3.0)
    set_step_time(harness, SECOND, 3.5, 1.0)
    harness.submit(make_request(2, 5, handle=1))
    assert placed_by(harness, SECOND, FIRST) == {1: FIRST}
    harness.submit(make_request(2, 5, handle=2))
    assert placed_by(harness, FIRST, SECOND) == {2: SECOND}


def test_an_executor_takes_as_many_rows_as_its_steps_have_time_for():
    """Of 4 ms and 1 ms for each row, nine tenths of 12 ms hold six."""
    limits = CoreLimits(itl_budget_s=0.012)
    harness = CoreHarness(make_executor(), limits=limits)
    harness.submit(make_request(2, 40), make_request(2, 40))
    harness.step()
    set_step_time(harness, FIRST, 4.0, 1.0)
    assert load_of(harness.views.executor(FIRST).view(), limits).free_rows == 4


def test_a_prefix_is_worth_no_more_than_the_time_it_saves():
    harness = pair(num_blocks=256, max_model_len=1024)
    harness.views.executor(SECOND).draining = True
    harness.submit(make_request([1, 2, 3, 4, 5], 1, handle=1))
    harness.finish()
    harness.submit(make_request(600, 2, handle=2))
    harness.step()
    harness.views.executor(SECOND).draining = False
    harness.submit(make_request([1, 2, 3, 4, 9], 2, handle=3))
    assert placed_by(harness, *BOTH) == {3: SECOND}


def test_an_executor_without_room_is_not_waited_for():
    """The prefix is where no row is free: the other executor computes it anew."""
    harness = pair(max_num_rows=1)
    prompt = list(range(40))
    begin_on_first(harness, make_request(prompt, 30, handle=1))
    harness.submit(make_request(prompt, 2, handle=2))
    assert placed_by(harness, *BOTH) == {2: SECOND}


def test_a_request_is_left_to_another_executor_only_so_long():
    """The one it was meant for never plans: half a second later the other one takes it, however often it planned."""
    harness = pair(num_blocks=256)
    begin_on_first(harness, *(make_request(2, 100) for _ in range(5)))
    harness.submit(make_request(2, 5, handle=1000))
    assert not any(placed_by(harness, FIRST) for _ in range(20))
    harness.clock.advance(MAX_LEFT_S + 0.01)
    assert placed_by(harness, FIRST) == {1000: FIRST}


def test_executors_of_different_models_have_lines_of_their_own():
    harness = CoreHarness(make_executor(max_num_rows=1), make_executor(model="other", incarnation=2))
    harness.submit(make_request(2, 50, handle=1), make_request(2, 2, handle=2))
    harness.submit(make_request(2, 2, handle=3, model="other"))
    assert placed_by(harness, *BOTH) == {1: FIRST, 3: SECOND}


def test_draining_moves_what_runs_to_another_executor_without_changing_a_token():
    harness = pair(max_num_rows=16, num_blocks=256)
    requests = [make_request(3 + handle % 4, 40, handle=handle) for handle in range(1, 13)]
    begin_on_first(harness, *requests)
    harness.steps(4)
    assert harness.drain() == 12
    for _ in range(12):
        for address in BOTH:
            harness.step(address)
    assert harness.views.counts(FIRST).num_running_requests == 0
    harness.finish()
    harness.assert_whole(*requests)


def test_an_executor_that_an_operator_drained_is_taken_back():
    harness = pair()
    running, waiting = make_request(3, 20, handle=1), make_request(4, 20, handle=2)
    harness.drain(SECOND)
    harness.submit(running)
    harness.step()
    harness.drain()
    harness.feed(UndrainExecutor(FIRST))
    harness.feed(UndrainExecutor(FIRST))  # asked twice it is no error
    harness.submit(waiting)
    harness.steps(3)
    assert harness.views.counts(FIRST).num_running_requests == 2
    assert harness.explain(running).preemption_reason == ""
    assert harness.views.counts(SECOND).num_running_requests == 0
    harness.finish()
    harness.assert_whole(running, waiting)


@pytest.mark.parametrize("is_drained_by_operator", [False, True])
def test_an_executor_that_goes_by_itself_is_not_taken_back(is_drained_by_operator):
    """It would refuse what is placed there; it serves again as another process."""
    harness = CoreHarness(make_executor())
    if is_drained_by_operator:
        harness.drain()
    harness.feed(DrainExecutor(FIRST, is_leaving=True))
    if is_drained_by_operator:
        harness.drain()
    harness.break_stream()
    with pytest.raises(ExecutorLeavingError, match="restart it"):
        harness.feed(UndrainExecutor(FIRST))
    assert harness.views.drains(FIRST)
    harness.die()
    harness.feed(UndrainExecutor(FIRST))
    assert not harness.views.drains(FIRST)


def test_a_move_does_not_count_as_a_preemption():
    harness = pair()
    request = make_request(3, 20, handle=1)
    begin_on_first(harness, request)
    harness.drain()
    harness.step()
    explanation = harness.explain(request)
    assert explanation.num_preemptions == 0
    assert explanation.preemption_reason == "executor-0 is being drained"


def test_requests_move_only_as_fast_as_others_take_them():
    """The other executor has two rows: the rest goes on where it is until there is room."""
    harness = CoreHarness(make_executor(max_num_rows=16), make_executor(max_num_rows=2, incarnation=2))
    requests = [make_request(3, 60, handle=handle) for handle in range(1, 12)]
    begin_on_first(harness, *requests)
    harness.drain()
    for _ in range(10):
        for address in BOTH:
            harness.step(address)
    assert harness.views.counts(FIRST).num_running_requests == 3
    harness.finish()
    assert harness.client.ended == set(range(1, 12))


def test_draining_moves_nothing_that_no_other_executor_can_hold():
    harness = CoreHarness(make_executor(), make_executor(num_blocks=8, incarnation=9))
    harness.submit(make_request(60, 20, handle=1), make_request(3, 20, handle=2))
    harness.step()
    harness.drain()
    harness.finish()
    assert harness.client.ended == {1, 2}


def test_what_moves_leaves_its_row_once():
    """A pool that runs out in the very plan that moves: a row is given away or preempted, never both."""
    harness = CoreHarness(
        *(
            make_executor(num_blocks=count, max_num_rows=32, max_num_batched_tokens=128, incarnation=count)
            for count in (24, 400)
        )
    )
    harness.expect_short_outputs()
    requests = [make_request(8, 60) for _ in range(2)]
    begin_on_first(harness, *requests)
    requests += [make_request(1, 60) for _ in range(8)]
    begin_on_first(harness, *requests[2:])
    harness.steps(7)
    harness.drain()
    harness.finish()
    harness.assert_whole(*requests)


def test_a_request_that_is_preempted_on_the_only_executor_while_it_drains_still_ends():
    """It was begun there and nobody else can take it."""
    harness = CoreHarness(make_executor(num_blocks=8))
    harness.expect_short_outputs()
    harness.submit(*(make_request(8, 20, handle=handle) for handle in (1, 2)))
    harness.step()
    harness.drain()
    harness.finish()
    assert harness.client.ended == {1, 2}


def test_what_is_lost_while_it_drains_still_drains_unless_it_comes_back_as_another_process():
    harness = CoreHarness(make_executor(num_blocks=8), make_executor(incarnation=9))
    harness.drain(SECOND)
    with pytest.raises(InvalidRequestError):
        harness.submit(make_request(100, 10))
    harness.lose(SECOND)
    harness.submit(make_request(100, 10, handle=1))
    harness.attach(SECOND)
    assert harness.views.drains(SECOND)
    harness.executors[SECOND].restart()
    harness.attach(SECOND)
    assert not harness.views.drains(SECOND)
    harness.finish()
    assert harness.client.ended == {1}


def test_the_step_that_is_due_is_the_oldest_without_a_result_of_an_executor_that_is_attached():
    harness = CoreHarness(make_executor())
    assert harness.views.due_step(FIRST) is None
    harness.submit(make_request(3, 5))
    first, second = harness.plan(), harness.plan()
    assert harness.views.due_step(FIRST).step_id == first.step_id
    harness.run()
    harness.complete()
    assert harness.views.due_step(FIRST).step_id == second.step_id
    harness.feed(StreamEnded(FIRST))
    assert harness.views.due_step(FIRST) is None


def test_many_requests_for_a_lost_executor_hold_nobody_up():
    """However many wait for it: what fits elsewhere runs."""
    harness = CoreHarness(make_executor(num_blocks=8), make_executor(incarnation=9))
    harness.lose(SECOND)
    harness.submit(*(make_request(60, 10) for _ in range(200)), make_request(3, 2, handle=5000))
    harness.finish()
    assert harness.client.ended == {5000}


def test_completions_go_where_their_prompt_is_being_computed():
    """The other executor is idle, but would have to compute the prompt anew."""
    harness = pair(num_blocks=512, max_num_batched_tokens=256)
    requests = [
        replace(make_request(list(range(200)), 2, handle=index + 1), key=RecordId("", "r", index), num_completions=2)
        for index in range(4)
    ]
    harness.submit(*requests)
    assert [placement.request.handle for placement in harness.plan(FIRST).new_requests] == [1]
    assert harness.plan(SECOND) is None, "the prompt is being computed elsewhere"
    harness.run()
    harness.complete()
    assert placed_by(harness, *BOTH) == dict.fromkeys((2, 3, 4), FIRST)


def test_what_was_learnt_of_an_executor_survives_a_broken_stream():
    harness = running(*(make_request(3, 30) for _ in range(4)), steps=20)
    before = harness.views.executor(FIRST)
    harness.attach()
    after = harness.views.executor(FIRST)
    assert after is not before
    assert (after.step_time, after.output_lengths) == (before.step_time, before.output_lengths)


# Executors of different size: nothing runs where it could never end, and nothing waits for what will never come


@pytest.mark.parametrize("small", [{"num_blocks": 8}, {"max_model_len": 40}], ids=["pool", "context"])
@pytest.mark.parametrize("num_prompt", [8, 60])
def test_a_request_runs_only_where_it_can_end(small, num_prompt):
    harness = CoreHarness(make_executor(**small), make_executor(incarnation=9))
    large, tiny = make_request(num_prompt, 100, handle=1), make_request(4, 4, handle=2)
    harness.submit(large, tiny)
    assert [placement.request.handle for placement in harness.plan(FIRST).new_requests] == [2]
    harness.finish()
    harness.assert_whole(large, tiny)


def test_without_max_tokens_a_request_gets_what_its_executor_allows():
    harness = CoreHarness(make_executor(max_model_len=16), make_executor(max_model_len=64, incarnation=9))
    harness.submit(make_request(10, None, handle=1))
    harness.plan(FIRST)
    harness.finish()
    assert harness.client.finishes[1].num_output_tokens == 6
    assert harness.client.finishes[1].reason == FinishReason.LENGTH


def test_without_max_tokens_a_prompt_still_has_to_fit():
    harness = CoreHarness(make_executor(max_model_len=16), make_executor(max_model_len=64, incarnation=9))
    harness.submit(make_request(16, None, handle=1))
    assert harness.plan(FIRST) is None
    harness.finish()
    assert harness.client.finishes[1].num_output_tokens == 48


def test_what_only_a_forgotten_executor_could_hold_fails():
    """Nobody waits for what is not expected back."""
    harness = CoreHarness(make_executor(num_blocks=8), make_executor(incarnation=9))
    harness.submit(make_request(100, 10, handle=1))
    harness.lose(SECOND)
    harness.feed(ExecutorRemoved(SECOND))
    assert isinstance(harness.client.failures[1], NoLongerServedError)
    assert "33 tokens" in str(harness.client.failures[1])
    assert harness.views.num_waiting() == (0, 0)


@pytest.mark.parametrize(
    ("restarted", "sentence"),
    [({"num_blocks": 20}, "hold at most 81 tokens"), ({"model": "other"}, "'simulated' are gone")],
    ids=["smaller", "another model"],
)
def test_an_executor_that_returns_as_another_one_fails_what_it_can_no_longer_hold(restarted, sentence):
    harness = running(make_request(100, 40, handle=1))
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
