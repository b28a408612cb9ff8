"""The lines of a real scheduler and of its executor about requests: each names its request, and its trace if any."""

import asyncio
import json

import grpc.aio
from structlog.testing import capture_logs

from executor_rig.hash_executor import simulated_executor
from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_executor.runner.simulated import SimulatedRunner
from service_processes.logged import SchedulerTestProcess

MAX_WAIT_S = 60
TRACE_IDS = {"finished": "1" * 32, "cancelled": "2" * 32, "refused": "3" * 32, "failed": "4" * 32, "untraced": ""}
FIRST = ["timestamp", "level", "event"]


def ask(stub, name, max_tokens):
    request = pb.GenerateRequest(request_id=f"r-{name}", stopping={"max_tokens": max_tokens})
    request.token_ids.ids.extend(range(1, 9))
    traced = (("traceparent", f"00-{TRACE_IDS[name]}-{'b' * 16}-01"),) if TRACE_IDS[name] else ()
    return stub.Generate(request, metadata=traced)


async def end_of(stream):
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def live(stub, monkeypatch):
    """Two ends, a refusal, a request whose steps fail and a cancel."""
    assert await end_of(ask(stub, "finished", 4)) is grpc.StatusCode.OK
    assert await end_of(ask(stub, "untraced", 4)) is grpc.StatusCode.OK
    assert await end_of(ask(stub, "refused", -1)) is grpc.StatusCode.INVALID_ARGUMENT
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedRunner, "launch", lambda *_: 1 // 0)
        assert await end_of(ask(stub, "failed", 4)) is grpc.StatusCode.INTERNAL
    stream = ask(stub, "cancelled", 1000)
    await anext(aiter(stream))
    await stub.Cancel(pb.CancelRequest(request_id="r-cancelled"))
    await end_of(stream)


async def test_every_line_about_a_request_names_it_and_its_trace(monkeypatch):
    with capture_logs() as executors_lines:
        async with simulated_executor() as executor:
            process = await SchedulerTestProcess.start("--executors", executor.address, "--log-requests", "1")
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    ready = await process.event("ready")
                    async with grpc.aio.insecure_channel(f"127.0.0.1:{ready['port']}") as channel:
                        await live(InferenceServiceStub(channel), monkeypatch)
                    await process.event("request_finished", lambda line: line["request_id"] == "r-cancelled")
            finally:
                await process.stop()
    ends = {line["request_id"]: line["reason"] for line in process.events if line["event"] == "request_finished"}
    assert ends == {
        "r-finished": "length",
        "r-untraced": "length",
        "r-failed": "STEP_FAILED",
        "r-cancelled": "cancelled",
    }
    assert "request_refused" in process.names()
    for line in process.events:
        named = [name for name in TRACE_IDS if f"r-{name}" in json.dumps(line)]
        assert [line[key] for key in line if key == "request_id"] == [f"r-{name}" for name in named], line
        assert line.get("trace_id", "") == "".join(TRACE_IDS[name] for name in named), line
        assert [key for key in line if key != "exception"] == FIRST + sorted(line.keys() - {*FIRST, "exception"}), line
    failed = [line for line in executors_lines if line["event"] == "step_failed"]
    assert {(line.get("request_id"), line.get("trace_id")) for line in failed} == {("r-failed", TRACE_IDS["failed"])}
