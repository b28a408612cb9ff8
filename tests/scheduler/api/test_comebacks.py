"""Clients that come back over real gRPC, and sessions whose client is gone without a word."""

import asyncio
from contextlib import aclosing

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from paceline.plan.values import FinishReason, RecordId
from paceline.process.callers import ANYBODY
from paceline.v1 import inference_pb2 as pb
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.servicer_session import serve_session
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.testing.edge_server import NOON, wait_until
from paceline_scheduler.testing.refusals import refusal_of
from paceline_scheduler.testing.scripted_backend import ScriptedBackend
from paceline_scheduler.testing.tiny import END, MODEL, encode
from paceline_scheduler.testing.tokenizers import try_here
from paceline_scheduler.testing.virtual_time import run_in_virtual_time

# A tenth of a second is a long silence.
LIMITS = EdgeLimits(heartbeat_s=0.02, silence_s=0.1)


def generate(**fields):
    """A resumable request, as a session takes it."""
    return pb.SessionRequest(generate=pb.GenerateRequest(request_id="r", text="hi", resumable=True, **fields))


HEARTBEAT = pb.SessionRequest(heartbeat=pb.Heartbeat())
ACKNOWLEDGEMENT = pb.SessionRequest(acknowledge=pb.Acknowledge(request_ids=["r"]))


async def read(call):
    """The next message of a session that is more than a heartbeat."""
    async with asyncio.timeout(60):
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.deltas or message.failures:
                return message
    return message


@pytest.fixture
async def broken(stub, backend):
    """The handle of a request with one token, "a", whose session the client has read and cancelled."""
    call = stub.Session()
    await call.write(generate())
    handle = (await backend.next_request()).handle
    backend.step({handle: encode("a")})
    assert (await read(call)).deltas[0].delta.text == "a"
    call.cancel()
    await wait_until(lambda: backend.asked.detached)
    return handle


def comeback(**fields):
    """The second attachment, of a client that holds the "a"."""
    return generate(attachment=2, resume_from=1, prior_output_token_ids=encode("a"), **fields)


async def test_another_session_goes_on_with_a_request_and_may_acknowledge_its_end(stub, backend, broken):
    backend.step({broken: encode("b")})
    call = stub.Session()
    await call.write(comeback())
    (item,) = (await read(call)).deltas
    assert (item.delta.offset, item.delta.text) == (1, "b")
    backend.step({broken: [END]}, {broken: FinishReason.STOP})
    assert (await read(call)).deltas[0].delta.finish.stop_token_id == END
    assert backend.asked.ended == []
    await call.write(ACKNOWLEDGEMENT)
    await wait_until(lambda: backend.asked.acknowledged)
    assert backend.asked.acknowledged == [RecordId("", "r")]
    call.cancel()


async def test_a_refused_comeback_acknowledges_nothing(stub, backend, broken):
    call = stub.Session()
    await call.write(comeback(last_attempt=2**31))
    (failure,) = (await read(call)).failures
    assert failure.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    await call.write(ACKNOWLEDGEMENT)
    await call.write(comeback(timeout={"seconds": 1}, last_attempt=2**31))
    await read(call)
    assert backend.asked.acknowledged == []
    call.cancel()


async def test_a_generate_call_is_resumed_by_a_session_and_ends_with_aborted(stub, backend):
    call = stub.Generate(generate().generate)
    handle = (await backend.next_request()).handle
    backend.step({handle: encode("a")})
    assert (await call.read()).delta.text == "a"
    session = stub.Session()
    await session.write(comeback())
    code, _, details = await refusal_of(call.read())
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.ABORTED, "STALE_ATTACHMENT")
    backend.step({handle: encode("b")})
    assert (await read(session)).deltas[0].delta.text == "b"
    session.cancel()


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_client_that_has_beaten_and_falls_silent_is_lost(server, backend, is_read):
    """Also where its last message is never taken: whoever sends it does not come back."""

    async def falls_silent():
        yield generate()
        await backend.next_request()  # silence counts from the first heartbeat on
        yield HEARTBEAT
        await asyncio.Event().wait()

    async with aclosing(serve_session(server.edge, falls_silent(), ANYBODY)) as responses:
        await anext(responses)
        if is_read:
            async for _ in responses:
                pass
        await wait_until(lambda: backend.asked.detached)
        assert backend.asked.ended == []


def seconds_until_the_end(*messages, at_most, thinks_s=0.0):
    """How long a session lasts whose client sends these messages, each after its thought, and then nothing."""

    async def send():
        for message in messages:
            await asyncio.sleep(thinks_s)
            yield message
        await asyncio.Event().wait()

    async def last():
        limits = EdgeLimits()
        backend = ScriptedBackend(MODEL)
        edge = Edge(backend, backend, Texts(limits, lambda: NOON, trial=try_here), limits)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        async with aclosing(serve_session(edge, send(), ANYBODY)) as responses:
            async for _ in responses:
                if loop.time() - start_s > at_most:
                    break
        assert not edge.requests.calls()
        return loop.time() - start_s

    return run_in_virtual_time(last())


def test_a_session_lasts_three_seconds_longer_than_its_client_says_anything():
    """Whatever it says counts; one that never sent a heartbeat says nothing by its silence."""
    assert seconds_until_the_end(HEARTBEAT, at_most=60) == pytest.approx(3.0, abs=0.5)
    assert seconds_until_the_end(HEARTBEAT, ACKNOWLEDGEMENT, at_most=60, thinks_s=2.4) == pytest.approx(7.8, abs=0.5)
    assert seconds_until_the_end(ACKNOWLEDGEMENT, at_most=60) > 60
    assert seconds_until_the_end(at_most=60) > 60
