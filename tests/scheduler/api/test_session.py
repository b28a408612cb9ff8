"""Session over real gRPC: many requests on one stream, one message per step, failures inside.

And clients that come back to their requests, and sessions whose client is gone without a word.
"""

import asyncio
import gc
from contextlib import aclosing

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from structlog.testing import capture_logs

from edge_rig.edge_server import NOON, SLOW_CHANNEL, wait_until
from edge_rig.refusals import refusal_of
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tiny import END, LONG_MODEL, encode
from edge_rig.tokenizers import try_here
from paceline.plan.values import FinishReason, RecordId
from paceline.process.callers import ANYBODY
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.servicer_session import serve_session
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.errors import DeadlineExceededError
from virtual_time import run_in_virtual_time

MODEL = LONG_MODEL
LIMITS = EdgeLimits(max_stream_bytes=16 * 1024, max_session_requests=100, heartbeat_s=0.05)


class Session:
    """A client's session: what it sends, and everything it has read but heartbeats."""

    def __init__(self, call):
        self.call = call

    async def generate(self, request_id, text="hi", **fields):
        message = pb.GenerateRequest(request_id=request_id, text=text, **fields)
        await self.call.write(pb.SessionRequest(generate=message))

    async def read(self):
        """The next message that is more than a heartbeat."""
        async with asyncio.timeout(20):
            while (message := await self.call.read()) is not grpc.aio.EOF:
                if message.deltas or message.failures or message.HasField("drain"):
                    return message
        return message

    async def failure(self):
        """The next message, which holds one failure: its request, code and reason."""
        (failure,) = (await self.read()).failures
        info = ErrorInfo.FromString(failure.error.details[0].value)
        return failure.request_id, failure.error.code, info


@pytest.fixture
async def session(stub):
    """A session of that client."""
    call = stub.Session()
    yield Session(call)
    call.cancel()


HEARTBEAT = pb.SessionRequest(heartbeat=pb.Heartbeat())
ACKNOWLEDGEMENT = pb.SessionRequest(acknowledge=pb.Acknowledge(request_ids=["r1"]))


async def test_64_requests_get_one_message_per_step(session, backend):
    for number in range(64):
        await session.generate(f"r{number}")
    handles = [(await backend.next_request()).handle for _ in range(64)]
    for word in ("Pa", "ris"):
        backend.step({handle: encode(word) for handle in handles})
        message = await session.read()
        assert sorted(item.request_id for item in message.deltas) == sorted(f"r{number}" for number in range(64))
        assert {item.delta.text for item in message.deltas} == {word}


async def test_steps_that_come_while_the_stream_is_busy_are_joined(session, backend):
    await session.generate("r")
    handle = (await backend.next_request()).handle
    for letter in "abc":
        backend.step({handle: encode(letter)})
    (item,) = (await session.read()).deltas
    assert (item.delta.text, item.delta.offset, list(item.delta.token_ids)) == (
        "abc",
        0,
        encode("a") + encode("b") + encode("c"),
    )


async def test_a_failing_request_fails_alone(session, backend):
    """Wrong, unsupported, without an id or failed later: the session goes on."""
    await session.generate("bad", sampling=sampling_pb2.SamplingParams(top_p=2))
    name, code, info = await session.failure()
    assert (name, code, info.reason, info.metadata["field"]) == ("bad", 3, "INVALID_FIELD", "sampling.top_p")
    await session.generate("unsupported", adapter="a")
    assert (await session.failure())[2].metadata["feature"] == "adapter"
    await session.generate("form", structured=sampling_pb2.StructuredOutput(regex="("))
    _, code, info = await session.failure()
    assert (code, info.reason, info.metadata["field"]) == (3, "STRUCTURED_MALFORMED", "structured.regex")
    await session.generate("")
    assert (await session.failure())[2].metadata["field"] == "request_id"
    await session.generate("late")
    handle = (await backend.next_request()).handle
    backend.step({handle: encode("a")})
    backend.fail(handle, DeadlineExceededError("too late"))
    message = await session.read()
    assert (message.deltas[0].delta.text, message.failures[0].error.code) == ("a", 4)

    await session.generate("good")
    handle = (await backend.next_request()).handle
    backend.step({handle: [*encode("b"), END]}, {handle: FinishReason.STOP})
    (item,) = (await session.read()).deltas
    assert (item.request_id, item.delta.text, item.delta.finish.stop_token_id) == ("good", "b", END)


async def test_a_request_that_breaks_the_scheduler_is_told_nothing_of_how(session, backend, monkeypatch):
    def broken(event):
        raise RuntimeError("secret")

    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with monkeypatch.context() as patch, capture_logs() as lines:
        patch.setattr(backend, "feed", broken)
        await session.generate("r", trace_parent=f"00-{trace_id}-b7ad6b7169203331-01")
        failure = (await session.read()).failures[0]
    assert (failure.error.code, "secret" in str(failure)) == (13, False)
    assert [(line["event"], line["request_id"], line["trace_id"]) for line in lines] == [
        ("request_failed", "r", trace_id)
    ]
    await session.generate("r")
    await backend.next_request()


async def test_cancel_ends_one_request(session, backend):
    await session.generate("r1", tenant="t")
    await backend.next_request()
    await session.generate("r2")
    other = (await backend.next_request()).handle
    await session.call.write(pb.SessionRequest(cancel=pb.CancelRequest(request_id="unknown")))
    await session.call.write(pb.SessionRequest(cancel=pb.CancelRequest(tenant="t", request_id="r1")))
    (item,) = (await session.read()).deltas
    assert (item.request_id, item.delta.finish.reason) == ("r1", sampling_pb2.FINISH_REASON_CANCELLED)
    backend.step({other: encode("a")})
    assert (await session.read()).deltas[0].request_id == "r2"


async def test_acknowledged_finishes_reach_the_backend_with_their_tenant(session, backend):
    """Among any number of others."""
    await session.generate("r1", tenant="t")
    handle = (await backend.next_request()).handle
    backend.step({handle: [END]}, {handle: FinishReason.STOP})
    await session.read()
    many = [*(f"unknown-{number}" for number in range(10_000)), "r1", "r1"]
    await session.call.write(pb.SessionRequest(acknowledge=pb.Acknowledge(request_ids=many)))
    await wait_until(lambda: backend.asked.acknowledged)
    assert backend.asked.acknowledged == [RecordId("t", "r1")]


async def test_an_acknowledgement_is_for_all_completions(session, backend):
    await session.generate("r1", sampling=sampling_pb2.SamplingParams(n=2))
    handles = [(await backend.next_request()).handle for _ in range(2)]
    backend.step({handle: [END] for handle in handles}, dict.fromkeys(handles, FinishReason.STOP))
    assert [item.delta.index for item in (await session.read()).deltas] == [0, 1]
    await session.call.write(ACKNOWLEDGEMENT)
    await wait_until(lambda: backend.asked.acknowledged)
    assert backend.asked.acknowledged == [RecordId("", "r1", 0), RecordId("", "r1", 1)]


async def test_heartbeats_come_at_once_and_then_regularly(session):
    for _ in range(3):
        assert (await session.call.read()).HasField("heartbeat")
    await session.call.write(HEARTBEAT)
    assert (await session.call.read()).HasField("heartbeat")


@pytest.mark.parametrize(
    ("cancel", "field"),
    [
        (pb.CancelRequest(request_id=""), "request_id"),
        (pb.CancelRequest(request_id="x" * 129), "request_id"),
        (pb.CancelRequest(request_id="other", tenant="x" * 129), "tenant"),
    ],
    ids=["no-id", "long-id", "long-tenant"],
)
async def test_a_cancel_of_an_impossible_name_fails_alone(session, backend, cancel, field):
    await session.generate("r")
    handle = (await backend.next_request()).handle
    await session.call.write(pb.SessionRequest(cancel=cancel))
    name, code, info = await session.failure()
    assert (name, code, info.metadata["field"]) == (cancel.request_id, 3, field)
    backend.step({handle: encode("a")})
    assert (await session.read()).deltas[0].delta.text == "a"


@pytest.mark.parametrize("kind", ["generate", "cancel"])
async def test_an_endless_name_is_told_back_cut(session, kind):
    """Still longer than any name that is taken, so that it is taken for no other."""
    message = pb.SessionRequest()
    getattr(message, kind).request_id = "x" * 1_000_000
    await session.call.write(message)
    name, code, _ = await session.failure()
    assert (code, name[128:129], len(name) < 2000) == (3, "x", True)


async def test_a_message_that_is_none_ends_the_session_and_its_requests(session, backend):
    await session.generate("r")
    handle = (await backend.next_request()).handle
    await session.call.write(pb.SessionRequest())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await session.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await wait_until(lambda: backend.asked.ended)
    assert backend.asked.ended == [(handle, 0, FinishReason.CANCELLED)]


async def test_a_client_that_ends_its_side_gets_the_rest_of_its_requests(session, backend):
    await session.generate("r1")
    await session.generate("r2")
    handles = [(await backend.next_request()).handle for _ in range(2)]
    await session.call.done_writing()
    for handle in handles:
        backend.step({handle: encode("a")}, {handle: FinishReason.LENGTH})
        assert (await session.read()).deltas[0].delta.text == "a"
    assert await session.read() is grpc.aio.EOF
    assert backend.asked.ended == []


async def test_a_cancelled_session_ends_its_requests_exactly_once(session, server, backend):
    await session.generate("r1")
    handle = (await backend.next_request()).handle
    await session.generate("long", text="hello " * 1500)
    await wait_until(lambda: server.edge.requests.by_key(RecordId("", "long")))
    session.call.cancel()
    await wait_until(lambda: not server.edge.requests.calls())
    await wait_until(lambda: len(backend.asked.ended) == len(backend.asked.requests))
    assert (handle, 0, FinishReason.CANCELLED) in backend.asked.ended
    assert len(set(backend.asked.ended)) == len(backend.asked.ended)
    assert len(server.edge.requests) == 0
    await wait_until(lambda: not [task for task in asyncio.all_tasks() if "Session" in repr(task.get_coro())])


async def test_a_drain_is_announced_and_ends_the_session_when_its_requests_are_done(session, server, backend):
    await session.generate("r1")
    handle = (await backend.next_request()).handle
    server.edge.drain("restart", grace_s=2.5)
    message = await session.read()
    assert (message.drain.reason, message.drain.grace.ToMilliseconds()) == ("restart", 2500)
    await session.generate("r2")
    name, code, info = await session.failure()
    assert (name, code, info.reason) == ("r2", 14, "DRAINING")
    backend.step({handle: encode("a")}, {handle: FinishReason.LENGTH})
    assert (await session.read()).deltas[0].delta.text == "a"
    assert await session.read() is grpc.aio.EOF
    async with asyncio.timeout(10):
        await server.edge.drained()


async def test_a_scheduler_that_shuts_down_lists_no_models(server, stub):
    server.edge.drain("restart", grace_s=1.0)
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
        await stub.ListModels(pb.ListModelsRequest())


async def test_a_session_that_begins_while_draining_ends_at_once(server, stub):
    server.edge.drain("restart", grace_s=1.0)
    session = Session(stub.Session())
    assert (await session.read()).drain.reason == "restart"
    assert await session.read() is grpc.aio.EOF


async def test_a_session_that_is_not_read_is_cut_and_another_is_not(server, session, backend):
    async with grpc.aio.insecure_channel(server.address, options=SLOW_CHANNEL) as channel:
        slow = Session(InferenceServiceStub(channel).Session())
        await slow.generate("slow1")
        await slow.generate("slow2")
        await session.generate("other")
        handles = {(request := await backend.next_request()).key.request_id: request.handle for _ in range(3)}
        text, running = encode("x" * 4000), {"slow1", "slow2"}
        for _ in range(10_000):
            backend.step({handles["other"]: encode("y")} | {handles[name]: text for name in running})
            running -= {
                name for name in running if any(handle == handles[name] for handle, _, _ in backend.asked.ended)
            }
            assert (await session.read()).deltas[0].delta.text == "y"
            if not running:
                break
        assert {reason for _, _, reason in backend.asked.ended} == {FinishReason.ERROR}
        failed = []
        while len(failed) < 2:
            failed += [(failure.request_id, failure.error.code) for failure in (await slow.read()).failures]
        assert sorted(failed) == [("slow1", 8), ("slow2", 8)]
        await slow.generate("slow3")
        handle = (await backend.next_request()).handle
        backend.step({handle: encode("z")})
        assert (await slow.read()).deltas[0].delta.text == "z"
        slow.call.cancel()


async def test_a_client_that_floods_with_bad_requests_and_reads_nothing_is_not_read_either(server):
    num_sent = 0

    async def flood():
        nonlocal num_sent
        for num_sent in range(1000):
            yield pb.SessionRequest(generate=pb.GenerateRequest(request_id=f"r{num_sent}", text=""))

    async with aclosing(serve_session(server.edge, flood(), ANYBODY)) as responses:
        num_failures = len((await anext(responses)).failures)
        for _ in range(100):
            await asyncio.sleep(0)
        assert num_sent < 400
        async for response in responses:
            num_failures += len(response.failures)
        assert num_failures == 1000


async def test_a_reader_that_breaks_with_its_session_is_not_reported_as_forgotten(server):
    """The connection is gone, and so is everybody who could want to know why."""
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    async def broken():
        await asyncio.sleep(0)
        raise grpc.aio.InternalError("gone")
        yield

    async with aclosing(serve_session(server.edge, broken(), ANYBODY)) as responses:
        await anext(responses)
        await asyncio.sleep(0.01)
    gc.collect()
    await asyncio.sleep(0)
    assert reported == []


# Clients that come back


@pytest.fixture
async def broken(stub, backend):
    """The handle of a request with one token, "a", whose session the client has read and cancelled."""
    session = Session(stub.Session())
    await session.generate("r1", resumable=True)
    handle = (await backend.next_request()).handle
    backend.step({handle: encode("a")})
    assert (await session.read()).deltas[0].delta.text == "a"
    session.call.cancel()
    await wait_until(lambda: backend.asked.detached)
    return handle


async def come_back(session, **fields):
    """The second attachment, of a client that holds the "a"."""
    held = {"attachment": 2, "resume_from": 1, "prior_output_token_ids": encode("a")}
    await session.generate("r1", resumable=True, **held, **fields)


async def test_another_session_goes_on_with_a_request_and_may_acknowledge_its_end(session, backend, broken):
    backend.step({broken: encode("b")})
    await come_back(session)
    (item,) = (await session.read()).deltas
    assert (item.delta.offset, item.delta.text) == (1, "b")
    backend.step({broken: [END]}, {broken: FinishReason.STOP})
    assert (await session.read()).deltas[0].delta.finish.stop_token_id == END
    assert backend.asked.ended == []
    await session.call.write(ACKNOWLEDGEMENT)
    await wait_until(lambda: backend.asked.acknowledged)
    assert backend.asked.acknowledged == [RecordId("", "r1")]


async def test_a_refused_comeback_acknowledges_nothing(session, backend, broken):
    await come_back(session, last_attempt=2**31)
    _, code, _ = await session.failure()
    assert code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    await session.call.write(ACKNOWLEDGEMENT)
    await come_back(session, timeout={"seconds": 1}, last_attempt=2**31)
    await session.read()
    assert backend.asked.acknowledged == []


async def test_a_generate_call_is_resumed_by_a_session_and_ends_with_aborted(stub, session, backend):
    call = stub.Generate(pb.GenerateRequest(request_id="r1", text="hi", resumable=True))
    handle = (await backend.next_request()).handle
    backend.step({handle: encode("a")})
    assert (await call.read()).delta.text == "a"
    await come_back(session)
    code, _, details = await refusal_of(call.read())
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.ABORTED, "STALE_ATTACHMENT")
    backend.step({handle: encode("b")})
    assert (await session.read()).deltas[0].delta.text == "b"


# And those that say nothing any more


def read_texts():
    """With the model's tokenizer: the thread that reads it knows no virtual time."""
    texts = Texts(EdgeLimits(), lambda: NOON, trial=try_here)
    asyncio.run(texts.prepare(MODEL.tokenizer, MODEL.vocab_size))
    return texts


def new_edge(texts):
    """With the usual limits, for a session in virtual time."""
    backend = ScriptedBackend(MODEL)
    return Edge(backend, backend, texts, EdgeLimits()), backend


@pytest.mark.parametrize("is_read", [True, False])
def test_a_client_that_has_beaten_and_falls_silent_is_lost(is_read):
    """Also where its last message is never taken: whoever sends it does not come back."""
    texts = read_texts()

    async def scene():
        edge, backend = new_edge(texts)

        async def falls_silent():
            yield pb.SessionRequest(generate=pb.GenerateRequest(request_id="r1", text="hi", resumable=True))
            await backend.next_request()  # silence counts from the first heartbeat on
            yield HEARTBEAT
            await asyncio.Event().wait()

        async with asyncio.timeout(60), aclosing(serve_session(edge, falls_silent(), ANYBODY)) as responses:
            await anext(responses)
            if is_read:
                async for _ in responses:
                    pass
            await wait_until(lambda: backend.asked.detached)
            assert backend.asked.ended == []

    run_in_virtual_time(scene())


def seconds_until_the_end(*messages, at_most, thinks_s=0.0):
    """How long a session lasts whose client sends these messages, each after its thought, and then nothing."""

    async def send():
        for message in messages:
            await asyncio.sleep(thinks_s)
            yield message
        await asyncio.Event().wait()

    texts = read_texts()

    async def last():
        edge, _ = new_edge(texts)
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
