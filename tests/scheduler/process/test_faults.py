"""The scheduler process where the machine denies it something: a log, file descriptors, other processes."""

import asyncio
import contextlib
import resource
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest

from paceline.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2
from paceline_executor.testing.hash_executor import simulated_executor
from paceline_scheduler.testing.edge_server import wait_until
from paceline_scheduler.testing.measured_processes import module_process
from paceline_scheduler.testing.processes import SchedulerTestProcess

GENEROUS_S = 60
ANEW = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
NUM_EVENTS = 100  # that a log takes which nobody reads: more than fit into its pipe


@contextlib.asynccontextmanager
async def scheduler_process(step_ms=2):
    """Run a simulated executor and a scheduler process; yields both and the stubs of clients and operators."""
    async with contextlib.AsyncExitStack() as stack:
        executor = await stack.enter_async_context(simulated_executor(step_ms=step_ms))
        process = await SchedulerTestProcess.start("--executors", executor.address)
        stack.push_async_callback(process.stop)
        ready = await process.event("ready")
        clients = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{ready['port']}"))
        operators = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{ready['admin_port']}"))
        stubs = inference_pb2_grpc.InferenceServiceStub(clients), admin_pb2_grpc.AdminServiceStub(operators)
        yield executor, process, *stubs


async def num_tokens(client, max_tokens=20):
    """How many tokens a request gets that may have so many."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
        stopping=sampling_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    return sum([len(response.delta.token_ids) async for response in client.Generate(request)])


async def test_a_log_that_nobody_reads_or_that_is_closed_stalls_nothing():
    async with scheduler_process() as (executor, process, _, operator):
        process.clog_log()
        for _ in range(NUM_EVENTS):
            await operator.DrainExecutor(admin_pb2.DrainExecutorRequest(address=executor.address))
        assert (await operator.ListExecutors(admin_pb2.ListExecutorsRequest())).num_lost_log_lines == 0
        await executor.restart()
        process.unclog_log()
        await process.event("ready", lambda _: process.names().count("ready") == 2)
        assert process.names().count("executor_draining") == NUM_EVENTS
        process.close_log()
        await operator.DrainExecutor(admin_pb2.DrainExecutorRequest(address=executor.address))
        async with asyncio.timeout(GENEROUS_S):
            while not (await operator.ListExecutors(admin_pb2.ListExecutorsRequest())).num_lost_log_lines:
                pass
        process.signal(signal.SIGTERM)
        assert (await process.ended()) == (0, "")


def num_files(process_id):
    return len(list(Path(f"/proc/{process_id}/fd").iterdir()))


async def test_a_scheduler_out_of_descriptors_serves_whom_it_has_and_then_others_again():
    async with scheduler_process() as (_, process, client, _), AsyncExitStack() as strangers:
        assert await num_tokens(client, 1) == 1
        limit = num_files(process.process_id) + 4
        resource.prlimit(process.process_id, resource.RLIMIT_NOFILE, (limit, limit))
        port = (await process.event("listening"))["port"]
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            strangers.callback(writer.close)
        await wait_until(lambda: num_files(process.process_id) >= limit, GENEROUS_S)
        assert await num_tokens(client) == 20
        await strangers.aclose()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=ANEW) as channel:
            assert await num_tokens(inference_pb2_grpc.InferenceServiceStub(channel)) == 20


@pytest.mark.soak
async def test_a_client_that_stands_still_is_noticed_and_its_requests_end_with_their_window():
    """Its connection stays open; nobody else is held up."""
    async with scheduler_process(step_ms=20) as (executor, process, client, _), AsyncExitStack() as stack:
        port = (await process.event("listening"))["port"]
        load = module_process("paceline_client.testing.stream_load", f"127.0.0.1:{port}", "--num-streams", "4")
        other = await stack.enter_async_context(load)
        table = executor.table
        await wait_until(lambda: table.num_rows_in_use == 4, GENEROUS_S)
        await asyncio.sleep(1)  # for its first heartbeat: of one that never sends any only the transport decides
        other.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(GENEROUS_S):
            await process.event("session_silent")
        assert await num_tokens(client) == 20
        await wait_until(
            lambda: table.num_rows_in_use == 4, GENEROUS_S
        )  # its own are left by then, others go on without a listener
        await wait_until(lambda: not table.num_rows_in_use, GENEROUS_S)
        other.send_signal(signal.SIGCONT)
