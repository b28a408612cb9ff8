"""One executor process after another shortage: nobody reads its log any more, and it runs out of file descriptors."""

import asyncio
import json
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from paceline.v1 import executor_pb2, executor_pb2_grpc, plan_pb2
from paceline_executor.__main__ import ExitCode
from paceline_executor.testing.models import RandomCheckpoint, gguf_parts
from paceline_executor.testing.plan_client import attached, grants, request, tokens_by_row

COMMAND = [
    sys.executable,
    "-m",
    "paceline_executor",
    "--port",
    "0",
    "--health-port",
    "0",
    "--metrics-port",
    "0",
    "--kv-cache-memory",
    "4MiB",
]
GENEROUS_S = 30.0


@contextmanager
def executor(model):
    """A process that is ready, and its port; nobody reads its events from then on."""
    process = subprocess.Popen([*COMMAND, "--model", str(model)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        events = map(json.loads, process.stdout)
        ready = next((event for event in events if event["event"] == "ready"), None)
        assert ready is not None, process.stderr.read()
        process.stdout.close()
        yield process, ready["port"]
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


@contextmanager
def without_descriptors(process):
    """As long as it lasts the process can open nothing more."""
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    num_open = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_open, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)


async def answers(channel, timeout_s):
    """Whether the executor says who it is, over a connection of its own."""
    stub = executor_pb2_grpc.ExecutorServiceStub(channel)
    try:
        await stub.GetInfo(executor_pb2.GetInfoRequest(), timeout=timeout_s, wait_for_ready=True)
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_an_executor_lives_through_a_closed_log_and_a_want_of_descriptors(tmp_path):
    """The stream that is there goes on; new ones are taken again by itself; the drain ends with 0."""
    model = gguf_parts(RandomCheckpoint()).write(tmp_path / "tiny.gguf")
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200))
    with executor(model) as (process, port):
        address = f"127.0.0.1:{port}"
        async with attached(address) as client, grpc.aio.insecure_channel(address, options) as other:
            placing = plan_pb2.BatchPlan(new_requests=[request(0, [5, 6, 7])], grants=grants([(0, 0, 0)]))
            output = tokens_by_row(await client.run([(0, 3)], placing))[0]
            with without_descriptors(process):
                assert not await answers(other, 0.5)
                output += tokens_by_row(await client.run([(0, 1)]))[0]
            assert await answers(other, GENEROUS_S)
            output += tokens_by_row(await client.run([(0, 1)]))[0]
            await client.run((), plan_pb2.BatchPlan(releases=[plan_pb2.Release(row=0)]))
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError, match="drained"):
                await client.result()
        code = await asyncio.to_thread(process.wait, GENEROUS_S)

    assert len(output) == 3
    assert code == ExitCode.OK
