"""What comes to an executor and is no message, beyond its bounds or no hello: refused, and nothing in the log."""

import grpc
import pytest
import structlog
from grpc_status import rpc_status

from executor_rig.hash_executor import loaded
from executor_rig.hash_runner import HashRunner
from executor_rig.plan_client import attach_until, attached, hello, info_of, read
from paceline.v1 import executor_pb2_grpc, inference_pb2, plan_pb2
from paceline_executor.link.service import ExecutorService, ServiceConfig

EXECUTOR = "/paceline.v1.ExecutorService"
HEALTH = "/grpc.health.v1.Health"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
NO_MESSAGES = [b"\x1a\x7f", b"\xff\xff\xff", b"\x0b"]


@pytest.fixture
def logged():
    """Everything that is logged meanwhile."""
    with structlog.testing.capture_logs() as events:
        yield events


async def answer(address, method, *messages):
    """How a call ends that is sent these bytes."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(method)()
        try:
            for message in messages:
                await call.write(message)
            while await call.read() is not grpc.aio.EOF:
                pass
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            pass
        return await call.code(), await call.details()


async def tell(call, messages):
    """Send messages, and read until the call ends."""
    for message in messages:
        await call.write(message.SerializeToString())
    while True:
        await call.read()


@pytest.mark.parametrize(
    ("method", "data"),
    [
        *((f"{EXECUTOR}/{name}", NO_MESSAGES[0]) for name in ("GetInfo", "GetState", "GetTokenizer", "Profile")),
        *((f"{EXECUTOR}/Attach", data) for data in NO_MESSAGES),
        (f"{HEALTH}/Check", NO_MESSAGES[0]),
        (f"{HEALTH}/Watch", NO_MESSAGES[1]),
        (REFLECTION, NO_MESSAGES[2]),
    ],
)
async def test_bytes_that_are_no_message_are_an_invalid_argument(executor, logged, method, data):
    code, details = await answer(executor.address, method, data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "class" not in details
    assert not logged


async def test_the_port_for_probes_says_the_same(logged):
    service = ExecutorService(ServiceConfig("127.0.0.1", 0, 0), lambda: loaded(HashRunner(8, 4, 100)))
    _, health_port = await service.listen()
    try:
        code, _ = await answer(f"127.0.0.1:{health_port}", f"{HEALTH}/Check", NO_MESSAGES[0])
    finally:
        await service.stop()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert not [event for event in logged if "exc_info" in event]


@pytest.mark.parametrize("data", NO_MESSAGES)
async def test_bytes_that_are_no_message_end_a_stream_that_drives(executor, logged, data):
    greeting = plan_pb2.AttachRequest(hello=hello()).SerializeToString()
    code, details = await answer(executor.address, f"{EXECUTOR}/Attach", greeting, data)
    assert (code, details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{len(data)} bytes are not a message of type AttachRequest",
    )
    async with attached(executor.address, hello(term=5)) as client:
        assert (await client.run()).step_id == 1
    assert not logged


# One of each kind of message; `test_plan_bounds` has every field.
LIES = {
    "hello.term": plan_pb2.AttachRequest(hello=plan_pb2.Hello(scheduler_id="x", term=2**63 - 1)),
    "heartbeat.running_ns": plan_pb2.AttachRequest(heartbeat=inference_pb2.Heartbeat(running_ns=2**64 - 1)),
    "predicted_ns": plan_pb2.AttachRequest(plan=plan_pb2.BatchPlan(predicted_ns=2**64 - 1)),
    "grants.block_ids": plan_pb2.AttachRequest(
        plan=plan_pb2.BatchPlan(grants=plan_pb2.BlockGrants(block_ids=b"\xff" * 4))
    ),
}


@pytest.mark.parametrize("field", LIES)
@pytest.mark.parametrize("is_first", [True, False], ids=["at once", "after the hello"])
async def test_what_is_beyond_its_bound_ends_the_stream_by_name(executor, logged, field, is_first):
    messages = [LIES[field]] if is_first else [plan_pb2.AttachRequest(hello=hello()), LIES[field]]
    async with grpc.aio.insecure_channel(executor.address) as channel:
        call = channel.stream_stream(f"{EXECUTOR}/Attach")()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await tell(call, messages)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc_status.from_call(failure.value).message.startswith(f"{field} ")
    is_of_a_plan = not field.startswith(("hello.", "heartbeat."))
    assert info_of(failure.value).reason == ("PLAN_OUT_OF_BOUNDS" if is_of_a_plan else "ATTACH_MALFORMED")
    async with attached(executor.address, hello(term=5)) as client:
        assert (await client.run()).step_id == 1
    assert not logged


@pytest.mark.parametrize("protocols", [{"min_protocol": 3, "max_protocol": 4}, {"min_protocol": 0, "max_protocol": 0}])
async def test_a_hello_in_no_protocol_of_this_executor_is_refused(executor, protocols):
    greeting = plan_pb2.Hello(scheduler_id="x", term=1, **protocols)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await attach_until(executor.address, "welcome", greeting)
    assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert info_of(failure.value).reason == "PROTOCOL_MISMATCH"


@pytest.mark.parametrize(
    "messages",
    [
        [plan_pb2.AttachRequest(plan=plan_pb2.BatchPlan(step_id=1))],
        [plan_pb2.AttachRequest()],
        [plan_pb2.AttachRequest(heartbeat=inference_pb2.Heartbeat())],
        [],
        None,
    ],
    ids=["plan", "empty", "heartbeat", "end", "silence"],
)
async def test_a_stream_begins_with_hello(executor, monkeypatch, messages):
    """And is not kept open without one."""
    async with grpc.aio.insecure_channel(executor.address) as channel:
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Attach()
        if messages is None:
            monkeypatch.setattr("paceline_executor.link.plan_streams._HELLO_S", 0.01)
        else:
            for message in messages:
                await call.write(message)
            await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await read(call)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert info_of(failure.value).reason == "ATTACH_MALFORMED"
