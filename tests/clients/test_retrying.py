"""A refusal for lack of room is tried again, modestly and only where nothing can be doubled; so the settings say."""

import asyncio

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_client import AsyncClient, Keepalive, Limits, Retry, Timeout, Tls, errors
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
        (errors.OverloadedError("full"), 1, None, 0.1),
        (errors.OverloadedError("full"), 2, None, 0.15),
        (errors.OverloadedError("full", retry_after=2.0), 1, None, 2.0),
        (errors.OverloadedError("full", retry_after=5.1), 1, None, None),
        (errors.OverloadedError("full"), 3, None, None),
        (errors.UnavailableError("nobody"), 1, 0.2, 0.1),
        (errors.UnavailableError("nobody"), 1, 0.1, None),
        (errors.ConnectionLostError("lost"), 1, None, None),
        (errors.ConnectFailedError("refused"), 1, None, None),
        (errors.InvalidRequestError("wrong"), 1, None, None),
    ],
)
def test_how_long_to_wait(error, num_attempts, remaining_seconds, pause):
    """At least what the server asks for, never beyond the request's time, and not at all where it is no use."""
    retry = Retry(draw=lambda: 0.5)
    assert pause_before_retry(error, num_attempts, retry, remaining_seconds) == (pause and pytest.approx(pause))


@pytest.mark.parametrize(
    ("script", "options", "error", "num_requests"),
    [
        ([FULL], {"retry": Retry(max_attempts=2, initial_delay_seconds=0.01)}, errors.OverloadedError, 2),
        ([FULL], {"timeout": Timeout(total_seconds=0.02)}, errors.OverloadedError, 1),  # less than the pause
        (
            [Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "much later", retry_after_seconds=60)],
            {},
            errors.OverloadedError,
            1,
        ),
        ([Fail(grpc.StatusCode.INVALID_ARGUMENT, "bad", field="text")], {}, errors.InvalidRequestError, 1),
        ([Fail(grpc.StatusCode.INTERNAL, "bug")], {}, errors.ServerError, 1),
        ([Tokens((1,), "a"), Fail(grpc.StatusCode.INTERNAL, "bug")], {}, errors.ServerError, 1),
    ],
    ids=["attempts", "no time", "long wait", "invalid", "internal", "after a token"],
)
async def test_where_trying_again_is_no_use_the_failure_is_the_error(script, options, error, num_requests):
    async with FakeServer(script) as server:
        async with AsyncClient(server.target, **{"retry": QUICK, **options}) as client:
            with pytest.raises(error, match=script[-1].message) as caught:
                await client.generate("?")
        assert len(server.seen.requests) == num_requests
    assert (caught.value.reason, caught.value.retry_after) == (script[-1].reason, script[-1].retry_after_seconds)


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


# Settings


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Timeout(connect_seconds=0), "connect_seconds"),
        (lambda: Timeout(call_seconds=-1), "call_seconds"),
        (lambda: Timeout(total_seconds=float("nan")), "total_seconds"),
        (lambda: Retry(max_attempts=0), "max_attempts"),
        (lambda: Retry(multiplier=0.5), "multiplier"),
        (lambda: Retry(jitter=1), "jitter"),
        (lambda: Retry(max_outage_seconds=0), "max_outage_seconds"),
        (lambda: Keepalive(heartbeat_seconds=1, silence_seconds=1.5), "silence_seconds"),
        (lambda: Limits(max_buffered_tokens=0), "max_buffered_tokens"),
        (lambda: Tls(private_key=b"key"), "certificate_chain"),
        (lambda: Tls(root_certificates=b"roots", folder="x"), "folder"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(make, names):
    with pytest.raises(ValueError, match=names):
        make()


def test_pauses_grow_by_half_from_100_ms_to_5_s():
    retry = Retry(draw=lambda: 0.5)
    pauses = [retry.delay_seconds(n) for n in (1, 2, 3, 100)]
    assert pauses == pytest.approx([0.1, 0.15, 0.225, 5.0])


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_no_pause_leaves_its_bounds(num_failures, drawn):
    """Between 80 ms and 5 s, whatever is drawn and however often it failed."""
    assert 0.08 <= Retry(draw=lambda: drawn).delay_seconds(num_failures) <= 5.0
