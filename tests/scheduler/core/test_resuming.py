"""A client comes back to its request: with what it holds, to what the request has, as whom it came before.

And before that: what of a new one is refused, what is delivered, and that a cancel gives blocks back at once.
"""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from both_sides.audited import expected_output, make_executor
from both_sides.harness import CoreHarness, running
from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import FinishReason, RecordId
from paceline_scheduler import errors
from paceline_scheduler.core.events import EndCompletion, Resume, StepFinished
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import ABANDONED_AFTER_S, RESUME_WINDOW_S
from paceline_scheduler.core.request import ResumePoint
from paceline_scheduler.core.requests.request_table import RETAIN_S
from scheduler_rig.requests import column, make_request


def resumable(max_tokens=12, **options):
    """A request whose client comes back."""
    return make_request(5, max_tokens, is_resumable=True, **options)


def holding(token_ids, last_attempt=1, prior=None):
    """What a client says that has these tokens; `prior` are those it sends."""
    held = np.array(token_ids, dtype=np.int32)
    return ResumePoint(len(held), rolling_hash(HASH_START, held), last_attempt, prior)


def come_back(harness, request, point, attachment=2):
    """The client attaches anew; returns what it is told."""
    return harness.feed(Resume((replace(request, attachment=attachment, point=point),)))[0]


def test_a_detached_request_runs_on_and_is_told_later():
    request = resumable()
    harness = running(request, steps=3)
    harness.detach(request)
    executor = harness.executors["executor-0"]
    for _ in range(3):
        plan = harness.core.plan("executor-0", harness.clock())
        harness.feed(StepFinished("executor-0", executor.execute(plan)))
    resumed = come_back(harness, request, holding(expected_output(request)[:2]))
    assert resumed.prefix_token_ids.tolist() == list(expected_output(request)[:2])
    assert resumed.outputs.offsets.tolist() == [2]
    assert tuple(resumed.outputs.token_ids) == expected_output(request)[2:6]
    assert come_back(harness, request, holding(expected_output(request)[:6]), 3).outputs is None


@pytest.mark.parametrize("steps", [3, 20])
def test_after_the_window_nobody_is_waited_for(steps):
    """The row leaves, unless the end had come before."""
    request = resumable()
    harness = running(request, steps=3)
    harness.detach(request)
    assert harness.wake_at == RESUME_WINDOW_S
    harness.steps(steps)
    harness.pass_time(RESUME_WINDOW_S)
    harness.finish()
    assert not harness.executors["executor-0"].rows
    resumed = come_back(harness, request, holding([]))
    assert (resumed.outputs is not None) == (steps == 20)


def test_who_came_back_in_time_is_waited_for_no_more():
    request = resumable(100)
    harness = running(request, steps=3)
    harness.detach(request)
    come_back(harness, request, holding(expected_output(request)[:3]))
    harness.pass_time(2 * RESUME_WINDOW_S)
    harness.finish()
    harness.assert_whole(request)


def test_what_is_not_resumable_ends_with_its_listener():
    """Nobody could ask for it."""
    request = make_request(5, 12)
    harness = running(request, steps=3)
    harness.detach(request)
    harness.finish()
    assert not harness.executors["executor-0"].rows


@pytest.mark.parametrize("is_gone", [False, True])
def test_only_a_higher_attachment_takes_a_request_over(is_gone):
    """But for the newest itself, once nobody listens: its client was cut, and says so again."""
    request = resumable()
    harness = running(request, steps=3)
    come_back(harness, request, holding([]), 3)
    if is_gone:
        harness.detach(request)
    with pytest.raises(errors.StaleAttachmentError):
        come_back(harness, request, holding([]), 2)
    with contextlib.nullcontext() if is_gone else pytest.raises(errors.DuplicateRequestError):
        come_back(harness, request, holding([]), 3)


def test_the_end_of_an_older_attachment_has_no_effect():
    request = resumable(100)
    harness = running(request, steps=3)
    newer = replace(request, handle=request.handle + 1000, attachment=2)
    harness.feed(Resume((newer,)))
    harness.detach(request)
    assert harness.wake_at is None
    assert harness.feed(EndCompletion(request.handle, 0, FinishReason.CANCELLED)) is None
    assert harness.plan() is not None


@pytest.mark.parametrize(
    "point",
    [
        ResumePoint(4, HASH_START),
        ResumePoint(2, HASH_START),
        ResumePoint(2, 7),
        holding([1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
    ids=["beyond the output", "hash of nothing", "any hash", "other tokens"],
)
def test_who_holds_other_tokens_and_does_not_send_them_is_refused(point):
    """And the request goes on as if nobody had come."""
    request = resumable()
    harness = running(request, steps=3)
    with pytest.raises(errors.ResumeMismatchError):
        come_back(harness, request, point)
    harness.finish()
    harness.assert_whole(request)


def test_who_holds_other_tokens_and_sends_them_gets_what_follows_those():
    """What the client has never changes: the row is let go, and the request computed behind the client's tokens."""
    request = resumable(6)
    harness = running(request, steps=3)
    other = column(7, 8)
    resumed = come_back(harness, request, holding([7, 8], prior=other))
    assert (resumed.prefix_token_ids.tolist(), resumed.outputs) == ([7, 8], None)
    harness.client.token_ids[request.handle] = [7, 8]
    harness.client.forget_after(request.handle, 2)
    harness.finish()
    prompt = np.concatenate((request.prompt_token_ids, other))
    assert len(harness.client.token_ids[request.handle]) == 6
    assert harness.client.attempts[request.handle] == 2
    assert harness.executors["executor-0"].records[request.key].prompt_token_ids.tolist() == prompt[:5].tolist()


def test_another_body_is_refused():
    request = resumable()
    harness = running(request, steps=3)
    other = replace(request, body_digest=b"another")
    with pytest.raises(errors.ResumeMismatchError):
        come_back(harness, other, holding([]))
    with pytest.raises(errors.DuplicateRequestError):
        come_back(harness, other, holding([]), attachment=1)


def test_another_tenant_starts_a_request_of_its_own():
    request = resumable(tenant="blue")
    harness = running(request, steps=3)
    stranger = replace(request, handle=999, key=RecordId("red", request.key.request_id))
    assert come_back(harness, stranger, holding([])).outputs is None
    assert harness.views.num_unfinished() == 2


def test_an_unknown_request_goes_on_from_what_its_client_sends():
    """Scheduler and executor died: nobody else knows anything."""
    request = resumable()
    harness = CoreHarness(make_executor())
    held = column(*expected_output(request)[:4])
    come_back(harness, request, holding(held, last_attempt=3, prior=held))
    harness.client.token_ids[request.handle] = held.tolist()
    harness.client.forget_after(request.handle, 4)
    harness.finish()
    harness.assert_whole(request)
    assert harness.client.attempts[request.handle] == 4


def test_an_unknown_request_without_its_tokens_is_refused():
    """What it had cannot be made up."""
    harness = CoreHarness(make_executor())
    with pytest.raises(errors.ResumeMismatchError, match="prior_output_token_ids"):
        come_back(harness, resumable(), holding([1, 2]))


@pytest.mark.parametrize(("end", "reason"), [((), FinishReason.LENGTH), ((4,), FinishReason.STOP)])
def test_a_client_that_lacks_only_the_finish_gets_it(end, reason):
    request = resumable(4 if not end else 9, end_token_ids=end)
    harness = CoreHarness(make_executor())
    held = column(1, 2, 3, 4)
    resumed = come_back(harness, request, holding(held, prior=held))
    notice = resumed.outputs.finishes[request.handle]
    assert (notice.reason, notice.num_output_tokens) == (reason, 4)
    assert harness.views.num_unfinished() == 0


def test_output_that_fills_the_context_is_an_end():
    harness = CoreHarness(make_executor(max_model_len=8))
    held = column(1, 2, 3)
    resumed = come_back(harness, resumable(None), holding(held, prior=held))
    assert [notice.reason for notice in resumed.outputs.finishes.values()] == [FinishReason.LENGTH]


def test_the_prompt_stays_what_it_was():
    request = resumable()
    harness = running(request, steps=3)
    again = replace(request, prompt_token_ids=column(1, 2))
    come_back(harness, again, holding(expected_output(request)[:3]))
    harness.lose()
    harness.attach()
    harness.finish()
    harness.assert_whole(request)


def test_an_end_is_kept_for_a_minute():
    """Then nobody knows the request: it begins anew for who holds nothing or sends what it holds."""
    request, other = resumable(3), resumable(3)
    harness = running(request, steps=6)
    assert come_back(harness, request, holding([])).outputs.finishes
    harness.clock.advance(RETAIN_S + 1)
    harness.submit(other)  # what has expired goes without anybody asking for it
    harness.finish()
    with pytest.raises(errors.ResumeMismatchError):
        come_back(harness, request, holding(expected_output(request)), 3)
    assert come_back(harness, request, holding([]), 3).outputs is None


def test_a_cancelled_request_does_not_begin_again():
    request = resumable()
    harness = running(request, steps=3)
    harness.detach(request)
    harness.cancel(request)
    harness.finish()
    resumed = come_back(harness, request, holding(expected_output(request)[:2]))
    assert resumed.outputs.finishes[request.handle].reason is FinishReason.CANCELLED
    assert tuple(resumed.outputs.token_ids) == expected_output(request)[2:3]


def test_one_that_waits_keeps_its_place():
    """Its client counts for it how long it has waited, also with a scheduler that never heard of it."""
    harness = CoreHarness(make_executor())
    harness.clock.advance(100)
    newer, older = resumable(), replace(resumable(), waited_s=7.0)
    harness.submit(newer)
    come_back(harness, older, holding([]))
    assert [live.request.handle for live in harness.views.waiting_requests()] == [older.handle, newer.handle]


def test_what_was_taken_once_is_not_refused_for_the_time_it_will_take():
    """It is owed; only a queue that is full turns it away for now."""
    limits = CoreLimits(ttft_budget_s=0.001, max_num_queued_reqs=3)
    harness = CoreHarness(make_executor(), limits=limits)
    harness.submit(resumable())
    with pytest.raises(errors.QueueFullError):
        harness.submit(resumable())
    come_back(harness, resumable(), holding([]))
    come_back(harness, resumable(), holding([]))
    with pytest.raises(errors.QueueFullError):
        come_back(harness, resumable(), holding([]))


def test_completions_come_back_together_or_not_at_all():
    harness = CoreHarness(make_executor(), limits=CoreLimits(max_num_queued_reqs=1))
    first = replace(resumable(), num_completions=2, attachment=2)
    second = replace(first, handle=first.handle + 1, key=replace(first.key, index=1))
    with pytest.raises(errors.QueueFullError):
        harness.feed(Resume((first, second)))
    assert (harness.views.num_unfinished(), harness.views.num_waiting()) == (0, (0, 0))


def test_the_deadline_is_that_of_the_newest_attachment():
    request = resumable(100, deadline_s=5.0)
    harness = running(request, steps=3)
    later = replace(request, deadline_s=50.0)
    come_back(harness, later, holding([]))
    assert harness.wake_at == 50.0


# Requests that nobody listens to give way after some seconds to those with a listener


def abandoned(number, num_rows=4):
    """So many resumable requests of one tenant have begun, as far as there are rows, when their client vanishes."""
    requests = [make_request(3, 200, is_resumable=True, tenant="vanished") for _ in range(number)]
    harness = running(*requests, on=make_executor(max_num_rows=num_rows, num_blocks=256), steps=5)
    for request in requests:
        harness.detach(request)
    return harness, requests


def pass_s(harness, seconds):
    """Let time pass, in steps."""
    for _ in range(5):
        harness.clock.advance(seconds / 5)
        harness.step()


def test_a_newcomer_is_served_soon_although_a_client_left_the_queue_full():
    harness, _ = abandoned(60)
    assert harness.views.num_waiting()[0] == 56
    pass_s(harness, ABANDONED_AFTER_S + 0.1)
    assert harness.views.num_waiting()[0] == 0
    newcomer = make_request(3, 5)
    harness.submit(newcomer)
    harness.steps(12)
    harness.assert_whole(newcomer)


def test_what_runs_goes_on_unheard_while_nobody_waits():
    harness, _ = abandoned(4)
    pass_s(harness, 2 * ABANDONED_AFTER_S)
    assert harness.views.counts("executor-0").num_running_requests == 4
    harness.submit(make_request(3, 5))
    harness.steps(12)
    assert harness.views.counts("executor-0").num_running_requests == 0


def test_a_client_that_comes_back_in_time_finds_its_request_where_it_was():
    """A restart or a broken connection costs it nothing, however many others wait."""
    harness, requests = abandoned(6)
    harness.submit(make_request(3, 5))
    pass_s(harness, ABANDONED_AFTER_S - 0.1)
    for request in requests:
        harness.resume(request)
    pass_s(harness, 2 * ABANDONED_AFTER_S)
    harness.finish()
    harness.assert_whole(*requests)


# Submission and ends


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field"),
    [(16, None, "prompt"), (17, 1, "prompt"), (10, 7, "stopping.max_tokens"), (10, 2**31 - 1, "stopping.max_tokens")],
)
def test_what_can_never_fit_the_context_is_refused(num_prompt, max_tokens, field):
    harness = CoreHarness(make_executor(max_model_len=16))
    with pytest.raises(errors.InvalidRequestError) as refusal:
        harness.submit(make_request(num_prompt, max_tokens))
    assert refusal.value.field == field
    assert harness.views.num_waiting() == (0, 0)


def test_what_can_never_fit_the_pool_is_refused():
    """Four blocks of four hold 16 computed tokens: a prompt of 10 can get 7 more, the last of which is not computed."""
    harness = CoreHarness(make_executor(num_blocks=4))
    with pytest.raises(errors.InvalidRequestError, match="at most 7 fit"):
        harness.submit(make_request(10, 8))
    request = make_request(10, 7)
    harness.submit(request)
    harness.finish()
    harness.assert_whole(request)


def test_a_full_queue_refuses_with_a_time_to_try_again():
    harness = CoreHarness(make_executor(), limits=CoreLimits(max_num_queued_reqs=2, max_num_queued_tokens=10))
    harness.submit(make_request(4, handle=1))
    with pytest.raises(errors.QueueFullError, match="tokens"):
        harness.submit(make_request(7))
    harness.submit(make_request(4, handle=2))
    with pytest.raises(errors.QueueFullError, match="requests") as refusal:
        harness.submit(make_request(1))
    assert 0 < refusal.value.retry_after_s <= 30
    harness.finish()
    assert harness.client.ended == {1, 2}


def test_a_stop_text_cuts_the_record():
    """The edge found a stop text at token 2 while token 3 was on its way: the executor's record ends at 2."""
    executor = make_executor()
    request = make_request(3, 50, handle=1)
    harness = running(request, on=executor, steps=3)
    harness.end(request, 2)
    harness.finish()
    record = executor.records[request.key]
    assert record.released.num_output_tokens == 2
    assert record.released.reason == FinishReason.STOP
    assert 1 not in harness.client.ended, "the edge knows already"


def test_a_deadline_that_passes_fails_the_request_wherever_it_is():
    """Running or waiting: one failure, nothing later, blocks free."""
    harness = running(
        make_request(3, 50, handle=1, deadline_s=5.0),
        make_request(3, 50, handle=2, deadline_s=6.0),
        on=make_executor(max_num_rows=1),
    )
    assert harness.wake_at == 5.0
    harness.pass_time(7)
    assert {type(error) for error in harness.client.failures.values()} == {errors.DeadlineExceededError}
    harness.finish()
    assert harness.client.ended == {1, 2}
    assert harness.wake_at is None
    assert harness.views.counts("executor-0").blocks.used == 0


# Cancelling gives blocks back at once, wherever a request stands


def num_used_blocks(harness):
    return harness.views.counts("executor-0").blocks.used


@pytest.mark.parametrize("num_steps", range(12))
@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_blocks_are_back_within_two_steps_of_a_cancel(num_steps, in_flight):
    request = make_request(20, 10, bypass_prefix_cache=True)
    harness = running(request, on=make_executor(max_num_batched_tokens=8), steps=0)
    harness.steps(num_steps)
    for _ in range(in_flight):
        harness.plan()
    harness.cancel(request)
    for _ in range(in_flight):
        harness.run()
        harness.complete()
    harness.steps(2)
    assert num_used_blocks(harness) == 0
    assert harness.client.finishes[request.handle].reason == FinishReason.CANCELLED
    assert harness.plan() is None
    harness.views.check()
