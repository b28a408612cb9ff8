"""The same over gRPC and real sockets, with executors as they are: what the simulated network leaves out."""

import contextlib

import pytest
from structlog.testing import capture_logs

from executor_rig.hash_executor import simulated_executor
from executor_rig.hash_runner import continuation
from executor_rig.plan_client import attached, hello
from paceline.bytes_tokenizer import PRINTABLE, make_bytes_tokenizer
from paceline_scheduler.link.linked_executor import ShownState
from paceline_scheduler.link.transport_grpc import GrpcTransport
from scheduler_rig.requests import make_request
from scheduler_rig.rig import SchedulerRig

VOCAB_SIZE = 1000  # prompts of `make_request` are from it
ROOM = ("--max-num-seqs", "16", "--max-model-len", "2048")


@contextlib.asynccontextmanager
async def executors(number):
    """Run executors without a model on free ports."""
    with capture_logs() as events:
        async with contextlib.AsyncExitStack() as stack:
            running = [simulated_executor(*ROOM, vocab_size=VOCAB_SIZE) for _ in range(number)]
            yield [await stack.enter_async_context(executor) for executor in running]
    assert reasons_of_refused_plans(events) == []


def reasons_of_refused_plans(events):
    """Why executors ended streams whose plans break rules."""
    reasons = [event["reason"] for event in events if event["event"] == "executor_detached"]
    return [reason for reason in reasons if reason.startswith(("DATA_LOSS", "INVALID_ARGUMENT"))]


def rig_for(*running, **options):
    return SchedulerRig(",".join(executor.address for executor in running), GrpcTransport(), **options)


def break_streams(executor):
    """End the plan streams of an executor, which stays."""
    executor.service.plan_streams.end_all("of the test")


def assert_right_tokens(rig, requests):
    """Every request ended, with the tokens of the reference."""
    assert rig.client.failures == {}
    for request in requests:
        expected = continuation(request.prompt_token_ids.tolist(), request.max_tokens, PRINTABLE, request.sampling.seed)
        assert rig.client.token_ids[request.handle] == expected


async def test_64_requests_of_mixed_lengths_all_get_the_right_tokens():
    async with executors(2) as (first, second), rig_for(first, second) as rig:
        await rig.until_ready(2)
        requests = [make_request(3 + 5 * (number % 12), 4 + number % 29) for number in range(64)]
        rig.submit(*requests)
        await rig.until(lambda: len(rig.client.ended) > 5)
        break_streams(first)
        await rig.until(lambda: len(rig.client.ended) > 25)
        break_streams(second)
        await rig.until_idle()
        assert_right_tokens(rig, requests)


async def test_a_refused_connection_is_told_at_once_and_tried_again():
    async with executors(1) as (executor,):
        await executor.stop()
        async with rig_for(executor) as rig:
            await rig.until(lambda: rig.states().get(executor.address) is ShownState.LOST)
            assert "refused" in rig.executors.statuses()[0].last_error.lower()
            await executor.start()
            await rig.until_ready()


async def test_the_holder_of_a_higher_term_is_told_from_an_end_of_the_stream():
    async with executors(1) as (executor,), rig_for(executor) as rig:
        await rig.until_ready()
        request = make_request(5, 1000)
        rig.submit(request)
        async with attached(executor.address, hello("scheduler-z", 9, takeover=True)):
            await rig.until(lambda: request.handle in rig.client.failures)
        assert "scheduler-z" in str(rig.client.failures[request.handle])
        assert rig.leadership.claim.term == 10


async def test_the_tokenizer_arrives_whole_over_many_parts():
    size = 100_000  # of more than a part
    async with simulated_executor(*ROOM, vocab_size=size) as executor, rig_for(executor) as rig:
        await rig.until_ready()
        tokenizer = rig.executors.models()[0].tokenizer
        assert tokenizer.json == make_bytes_tokenizer(size)
        assert tokenizer.end_token_ids == (258, 256)


async def test_a_plan_that_breaks_a_rule_ends_the_stream_and_the_link_recovers():
    with capture_logs() as events:
        async with simulated_executor(*ROOM, vocab_size=VOCAB_SIZE) as executor, rig_for(executor) as rig:
            await rig.until_ready()
            requests = [make_request(9, 300)]  # long enough that plans are still to come
            rig.submit(*requests)
            await rig.until(lambda: bool(rig.client.token_ids))
            rig.runtime.views.executor(executor.address).ledger.num_plans += 1  # a gap
            await rig.until_idle()
            assert_right_tokens(rig, requests)
    (reason,) = reasons_of_refused_plans(events)
    assert "step_id is" in reason


@pytest.mark.parametrize("number", [0, 3])
async def test_nothing_is_left_behind_when_the_links_stop(number):
    async with executors(1) as (executor,):
        async with rig_for(executor) as rig:
            await rig.until_ready()
            rig.submit(*(make_request(5, 500) for _ in range(number)))
        async with rig_for(executor, scheduler_id="scheduler-b") as other:
            await other.until_ready()
