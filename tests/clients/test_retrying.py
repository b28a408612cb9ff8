"""A refusal for lack of room is tried again, modestly and only where nothing can be doubled."""

import asyncio

import grpc
import pytest

from paceline_client import AsyncClient, InvalidRequestError, OverloadedError, Retry, Timeout, UnavailableError
from paceline_client.errors import ServerError
from paceline_client.testing import Fail, FakeServer, Tokens, fail_then, say

FULL = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", "QUEUE_FULL", retry_after_seconds=0.03)
NOBODY = Fail(grpc.StatusCode.UNAVAILABLE, "no executor serves the model", "NO_EXECUTOR")
QUICK = Retry(initial_delay_seconds=0.01)


@pytest.mark.parametrize("refusal", [FULL, NOBODY], ids=["full", "unavailable"])
async def test_a_refusal_is_tried_again(refusal):
    """Twice refused, then served: the caller sees the answer only, and the request keeps its id."""
    async with FakeServer(fail_then([refusal, refusal], say("yes"))) as server:
        async with AsyncClient(server.target, retry=QUICK) as client:
            assert (await client.generate("?")).text == "yes"
        first, second, third = server.seen.requests
    assert first == second == third


async def test_the_server_says_how_long_to_wait():
    """The pause is at least what RetryInfo asks for."""
    async with FakeServer(fail_then([FULL], say("yes"))) as server, AsyncClient(server.target, retry=QUICK) as client:
        started = asyncio.get_running_loop().time()
        await client.generate("?")
        assert asyncio.get_running_loop().time() - started >= FULL.retry_after_seconds


async def test_attempts_are_limited():
    """Then the refusal is the caller's, with what the server said."""
    async with FakeServer([FULL]) as server:
        async with AsyncClient(server.target, retry=Retry(max_attempts=2, initial_delay_seconds=0.01)) as client:
            with pytest.raises(OverloadedError, match="queue is full") as caught:
                await client.generate("?")
        assert len(server.seen.requests) == 2
    assert (caught.value.reason, caught.value.retry_after) == ("QUEUE_FULL", pytest.approx(0.03))


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([Fail(grpc.StatusCode.INVALID_ARGUMENT, "bad", field="text")], InvalidRequestError),
        ([Fail(grpc.StatusCode.INTERNAL, "bug")], ServerError),
        ([Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "much later", retry_after_seconds=60)], OverloadedError),
        ([Tokens((1,), "a"), NOBODY], UnavailableError),
    ],
    ids=["invalid", "internal", "long wait", "after a token"],
)
async def test_other_failures_are_not_tried_again(script, error):
    """What stays wrong, what may be a bug, what asks for too long a pause, and what has begun."""
    async with FakeServer(script) as server:
        async with AsyncClient(server.target, retry=QUICK) as client:
            with pytest.raises(error):
                await client.generate("?")
        assert len(server.seen.requests) == 1


async def test_no_attempt_outlasts_the_request():
    """A pause that would end after the request's time is not begun."""
    async with FakeServer([FULL]) as server:
        async with AsyncClient(server.target, retry=QUICK) as client:
            with pytest.raises(OverloadedError):
                await client.generate("?", timeout=Timeout(total_seconds=0.02))
        assert len(server.seen.requests) == 1


async def test_a_cancelled_wait_does_not_try_again():
    """Leaving during the pause between two attempts is final."""
    slow = Retry(initial_delay_seconds=5)
    async with FakeServer([FULL]) as server, AsyncClient(server.target, retry=slow) as client:
        task = asyncio.create_task(client.generate("?"))
        await server.seen_that(lambda seen: len(seen.requests) == 1)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(server.seen.requests) == 1
