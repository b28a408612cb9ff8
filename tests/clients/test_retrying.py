"""A refusal for lack of room is tried again, modestly and only where nothing can be doubled."""

import asyncio

import grpc
import pytest

from paceline_client import (
    AsyncClient,
    ConnectFailedError,
    ConnectionLostError,
    InvalidRequestError,
    OverloadedError,
    Retry,
    ServerError,
    Timeout,
    UnavailableError,
)
from paceline_client.recovery import pause_before_retry
from paceline_client.testing import Fail, FakeServer, Tokens, fail_then, say

FULL = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", "QUEUE_FULL", retry_after_seconds=0.03)
NOBODY = Fail(grpc.StatusCode.UNAVAILABLE, "no executor serves the model", "NO_EXECUTOR")
QUICK = Retry(initial_delay_seconds=0.01)


@pytest.mark.parametrize("refusal", [FULL, NOBODY], ids=["full", "unavailable"])
async def test_a_refusal_is_tried_again(refusal):
    """Twice refused, then served: the caller sees the answer only, and what comes is what came first, and when."""
    async with FakeServer(fail_then([refusal, refusal], say("yes"))) as server:
        async with AsyncClient(server.target, retry=QUICK) as client:
            assert (await client.generate("?")).text == "yes"
        first, *others = server.seen.requests
    assert len(others) == 2
    for again in others:
        assert again.waited.ToMilliseconds() > 0
        again.ClearField("waited")
        assert again == first


@pytest.mark.parametrize(
    ("error", "num_attempts", "remaining_seconds", "pause"),
    [
        (OverloadedError("full"), 1, None, 0.1),
        (OverloadedError("full"), 2, None, 0.15),
        (OverloadedError("full", retry_after=2.0), 1, None, 2.0),
        (OverloadedError("full", retry_after=5.1), 1, None, None),
        (OverloadedError("full"), 3, None, None),
        (UnavailableError("nobody"), 1, 0.2, 0.1),
        (UnavailableError("nobody"), 1, 0.1, None),
        (ConnectionLostError("lost"), 1, None, None),
        (ConnectFailedError("refused"), 1, None, None),
        (InvalidRequestError("wrong"), 1, None, None),
    ],
)
def test_how_long_to_wait(error, num_attempts, remaining_seconds, pause):
    """At least what the server asks for, never beyond the request's time, and not at all where it is no use."""
    retry = Retry(draw=lambda: 0.5)
    assert pause_before_retry(error, num_attempts, retry, remaining_seconds) == (pause and pytest.approx(pause))


async def test_attempts_are_limited():
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
        ([Tokens((1,), "a"), Fail(grpc.StatusCode.INTERNAL, "bug")], ServerError),
    ],
    ids=["invalid", "internal", "long wait", "after a token"],
)
async def test_other_failures_are_not_tried_again(script, error):
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
    slow = Retry(initial_delay_seconds=5)
    async with FakeServer([FULL]) as server, AsyncClient(server.target, retry=slow) as client:
        task = asyncio.create_task(client.generate("?"))
        await server.seen_that(lambda seen: len(seen.requests) == 1)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(server.seen.requests) == 1
