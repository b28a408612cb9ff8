"""A scheduler dies and another one takes over: requests go on from the executors, and from their clients."""

from dataclasses import replace

import pytest

from both_sides.audited import expected_logprobs, expected_output, make_executor
from both_sides.harness import CoreHarness, running
from paceline.plan.values import FinishReason, RecordId, RowFinish
from paceline_executor.runner.interface import RowProblem
from paceline_scheduler.core.answers import RequestState
from paceline_scheduler.core.events import (
    Cancel,
    ExecutorAttached,
    ExecutorRemoved,
    ExpectExecutors,
)
from paceline_scheduler.core.executors import Snapshot
from paceline_scheduler.core.live import RESUME_WINDOW_S
from scheduler_rig.requests import column, make_request

FIRST, SECOND = "executor-0", "executor-1"


def resumable(max_tokens=12, **options):
    """A request whose client will come back."""
    return make_request(5, max_tokens, is_resumable=True, **options)


def again(request, attachment=2):
    """The same request, sent once more."""
    return replace(request, attachment=attachment)


@pytest.mark.parametrize(("steps", "meanwhile"), [(1, 0), (2, 0), (5, 0), (11, 0), (3, 4), (3, 20)])
def test_a_request_goes_on_where_it_is(steps, meanwhile):
    """Before its client is back, too. Nothing is computed again: it keeps its row, its blocks and its attempt; and
    should it end meanwhile, its end is kept.
    """
    request = resumable(num_logprobs=2)
    harness = running(request, steps=steps)
    harness.succeed()
    harness.steps(meanwhile)
    assert len(harness.client.token_ids[request.handle]) == steps
    harness.resume(again(request))
    assert len(harness.client.token_ids[request.handle]) == min(steps + meanwhile, 12)
    harness.finish()
    harness.assert_whole(request)
    assert harness.client.logprobs[request.handle] == expected_logprobs(expected_output(request), 2)
    assert harness.client.finishes[request.handle].num_prompt_tokens == 5
    assert harness.client.attempts[request.handle] == 1


def test_a_successor_knows_what_runs_by_key_and_body():
    request = resumable()
    harness = running(request, steps=3)
    harness.succeed()
    found = harness.views.known(request.key, request.body_digest, request.model)
    assert found is not None
    assert found.prompt_token_ids.tolist() == request.prompt_token_ids.tolist()
    assert harness.views.known(request.key, b"another body", request.model) is None
    assert harness.views.known(make_request().key, request.body_digest, request.model) is None
    # A body that names no model meant the only one there was.
    assert harness.views.known(request.key, request.body_digest, "another model") is None


def test_a_request_that_had_ended_is_found_as_a_record():
    request = resumable(4)
    harness = running(request, steps=6)
    harness.client.forget_after(request.handle, 2)
    harness.succeed()
    harness.resume(again(request))
    harness.assert_whole(request)


def test_a_request_that_cannot_be_resumed_is_let_go():
    request = make_request(5, 12)
    harness = running(request, steps=3)
    harness.succeed()
    harness.step()
    assert not harness.executors[FIRST].rows


def test_a_client_that_does_not_come_back_is_waited_for_in_vain():
    request = resumable(40)
    harness = running(request, steps=3)
    harness.succeed()
    assert harness.wake_at == RESUME_WINDOW_S
    harness.pass_time(RESUME_WINDOW_S + 0.1)
    harness.finish()
    assert not harness.executors[FIRST].rows
    harness.resume(again(request))
    harness.finish()
    harness.assert_whole(request)
    assert harness.client.attempts[request.handle] == 2


@pytest.mark.parametrize("happens", [CoreHarness.succeed, CoreHarness.break_stream])
def test_the_prefix_cache_survives(happens):
    """Its keys are in the snapshot: the same prompt is not computed again."""
    request = make_request(list(range(20)), 4, is_resumable=True)
    harness = running(request, steps=8)
    happens(harness)
    twin = make_request(list(range(20)), 4)
    harness.submit(twin)
    harness.finish()
    assert harness.client.finishes[twin.handle].num_cached_tokens == 16


def test_counters_and_deadlines_go_on():
    request = resumable(40, deadline_s=20.0)
    harness = running(request, steps=3)
    harness.succeed()
    harness.pass_time(20.5)
    harness.finish()
    assert not harness.executors[FIRST].rows


def test_nothing_is_admitted_before_every_executor_has_spoken():
    """What is new might be on the one that has not."""
    request = resumable()
    harness = CoreHarness(make_executor(), make_executor(incarnation=2))
    harness.feed(ExpectExecutors((SECOND,)))
    harness.lose(SECOND)
    harness.feed(ExpectExecutors((SECOND,)))
    harness.submit(request)
    assert harness.plan(FIRST) is None
    harness.attach(SECOND)
    assert harness.plan(FIRST) is not None


def test_rows_of_synced_executors_run_on_meanwhile():
    """Only admission waits."""
    request = resumable()
    harness = running(request, steps=3)
    harness.succeed()
    harness.feed(ExpectExecutors(("executor-9",)))
    assert harness.step() is not None
    harness.lose("executor-9")
    assert harness.views.is_synced


def moved(request):
    """A request that was on the first executor, which froze, and is on the second one now with a higher attempt."""
    harness = CoreHarness(make_executor(), make_executor(incarnation=2))
    harness.submit(request)
    for address in (FIRST, SECOND) * 2:
        harness.step(address)
    address = FIRST if harness.executors[FIRST].rows else SECOND
    other = SECOND if address == FIRST else FIRST
    harness.lose(address)
    harness.steps(3, other)
    return harness, address, other


@pytest.mark.parametrize("is_zombie_first", [True, False])
def test_of_two_rows_the_higher_attempt_lives(is_zombie_first):
    request = resumable()
    harness, zombie, alive = moved(request)
    addresses = [zombie, alive] if is_zombie_first else [alive, zombie]
    harness.executors = {address: harness.executors[address] for address in addresses}
    harness.succeed()
    harness.resume(again(request))
    harness.finish()
    harness.assert_whole(request)
    assert harness.client.attempts[request.handle] == 2
    assert not any(executor.rows for executor in harness.executors.values())


def test_a_frozen_executor_that_wakes_with_the_row_of_a_waiting_request_runs_on():
    """Nobody else had room for it: it need not be computed again."""
    request = resumable()
    harness = running(request, steps=3)
    harness.lose()
    harness.attach()
    harness.finish()
    harness.assert_whole(request)
    assert harness.client.attempts[request.handle] == 1


def test_a_preempted_request_waits_on():
    request = resumable()
    harness = running(request, steps=3)
    live = harness.views.executor(FIRST).ledger.rows.live[0]
    harness.views.executor(FIRST).draining = False
    snapshot = harness.executors[FIRST].snapshot()
    (seen,) = snapshot.rows
    record = replace(seen, row=None, block_ids=column(), num_computed_tokens=0)
    other = make_executor(incarnation=2)
    harness = CoreHarness(other)
    description, _ = other.attach(FIRST)
    harness.lose()
    harness.feed(ExecutorRemoved(FIRST))
    harness.feed(ExecutorAttached(description, Snapshot(rows=(record,))))
    assert harness.explain(request).state is RequestState.WAITING
    harness.client.token_ids[request.handle] = live.output.token_ids.tolist()
    harness.resume(again(request))
    harness.finish()
    harness.assert_whole(request)


def test_a_row_that_failed_is_tried_once_more():
    request = resumable()
    harness = running(request, steps=3)
    harness.executors[FIRST].fail_row(request.key, RowProblem.NOT_FINITE)
    harness.run_ahead()
    assert harness.executors[FIRST].rows[0].finish is RowFinish.ERROR
    harness.succeed()
    harness.resume(again(request))
    harness.finish()
    harness.assert_whole(request)


def test_a_row_that_failed_unheard_is_tried_once_more():
    request = resumable()
    harness = running(request, steps=3)
    harness.executors[FIRST].fail_row(request.key, RowProblem.NOT_FINITE)
    harness.run_ahead()
    harness.break_stream()
    harness.finish()
    harness.assert_whole(request)


def test_completions_are_adopted_one_by_one():
    """They still belong together: a cancel of the request ends each."""
    first = resumable(30)
    requests = [
        replace(first, handle=first.handle + i, key=replace(first.key, index=i), num_completions=2) for i in (0, 1)
    ]
    harness = running(*requests, steps=4)
    harness.succeed()
    for index in (0, 1):
        key = RecordId(first.key.tenant, first.key.request_id, index)
        (tokens,) = harness.core.apply(Cancel(key), harness.clock()).tokens
        assert [notice.reason for notice in tokens.finishes.values()] == [FinishReason.CANCELLED]
    harness.finish()
    assert not harness.executors[FIRST].rows


def used_again(request, **changes):
    """Another request under the same id: another body."""
    return replace(request, handle=request.handle + 500, body_digest=b"another", **changes)


def test_output_of_an_older_request_is_not_taken_for_that_of_a_newer_one_of_its_id():
    """An executor that was given up comes back with the row of what was cancelled since."""
    request = resumable()
    harness = running(request, steps=3)
    harness.lose()
    harness.cancel(request)
    newer = used_again(request, prompt_token_ids=column(9, 9, 9))
    harness.submit(newer)
    harness.detach(newer)
    harness.attach()
    harness.resume(replace(newer, attachment=2))
    harness.finish()
    harness.assert_whole(newer)


def test_an_id_that_was_used_again_before_its_row_left_is_the_newer_requests():
    request = resumable()
    harness = running(request, steps=3)
    harness.cancel(request)
    newer = used_again(request, prompt_token_ids=column(9, 9, 9))
    harness.submit(newer)
    harness.succeed()
    harness.resume(replace(newer, attachment=2))
    harness.finish()
    harness.assert_whole(newer)
    assert not harness.executors[FIRST].rows


def test_a_client_that_has_everything_gets_its_end_from_whatever_is_left():
    """All but an older attempt died with the scheduler: nothing is left to generate."""
    request = resumable()
    harness = running(request, steps=3)
    harness.succeed()
    harness.client.token_ids[request.handle] = list(expected_output(request))
    harness.client.forget_after(request.handle, 12)
    harness.resume(again(request))
    assert harness.client.finishes[request.handle].reason is FinishReason.LENGTH
    harness.finish()
    assert not harness.executors[FIRST].rows


def test_a_restart_shares_no_block_of_the_output_it_gave_up():
    request = make_request(list(range(6)), 24, is_resumable=True)
    harness = running(request, steps=12)
    harness.drain()
    harness.lose()
    harness.attach()
    held = [int(token) + 1 for token in harness.client.token_ids[request.handle]]
    harness.client.token_ids[request.handle] = held
    harness.client.forget_after(request.handle, len(held))
    harness.resume(again(request))
    harness.finish()
    assert len(harness.client.token_ids[request.handle]) == 24


def test_a_suspect_that_is_found_on_a_row_runs_alone_again():
    harness = running(*(make_request(100, 8, is_resumable=True) for _ in range(2)), steps=0)
    for _ in range(2):
        harness.plan()
        harness.die()
    harness.step()  # a part of its prompt
    harness.attach()
    assert harness.views.executor(FIRST).suspects.rows == {0}
    harness.succeed()
    assert harness.views.executor(FIRST).suspects.rows == {0}
    assert len(harness.plan().rows) == 1
