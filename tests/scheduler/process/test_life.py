"""The scheduler process under load: health tells the truth, and a drain loses nothing.

And where the machine denies it something: a log, file descriptors, other processes.
"""

import asyncio
import contextlib
import resource
import signal
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge_rig.edge_server import wait_until
from executor_rig.hash_executor import simulated_executor
from executor_rig.hash_runner import continuation
from paceline.bytes_tokenizer import PRINTABLE
from paceline.plan.values import Drain
from paceline.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2
from paceline_executor.runner.simulated import BYTES_PER_TOKEN
from service_processes.logged import SchedulerTestProcess
from service_processes.measured import module_process

GENEROUS_S = 60
ANEW = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
NUM_EVENTS = 100  # that a log takes which nobody reads: more than fit into its pipe
NUM_BLOCKS = 512
ROOM = ("--max-num-seqs", "32", "--kv-cache-memory", str(NUM_BLOCKS * 16 * BYTES_PER_TOKEN))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def deployment(*arguments, step_ms=2.0):
    """Run a simulated executor and a scheduler process; yields both and a channel to the clients' port."""
    async with contextlib.AsyncExitStack() as stack:
        executor = await stack.enter_async_context(simulated_executor(*ROOM, step_ms=step_ms))
        process = await SchedulerTestProcess.start("--executors", executor.address, *arguments)
        stack.push_async_callback(process.stop)
        ready = await process.event("ready")
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{ready['port']}"))
        yield executor, process, channel
    reasons = [event["reason"] for event in process.events if event["event"] == "executor_detached"]
    assert not [reason for reason in reasons if reason.startswith(("INVALID_ARGUMENT", "DATA_LOSS"))]


@contextlib.asynccontextmanager
async def operators_of(process):
    """What operators ask a scheduler with."""
    port = (await process.event("listening"))["admin_port"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def a_request(number, max_tokens):
    """Return a request whose output is known."""
    return inference_pb2.GenerateRequest(
        request_id=f"r{number}",
        token_ids=inference_pb2.TokenIds(ids=[number % 200, 1, 2 + number % 7]),
        sampling=sampling_pb2.SamplingParams(seed=number),
        stopping=sampling_pb2.StoppingParams(max_tokens=max_tokens),
    )


def expected(request):
    return continuation(request.token_ids.ids, request.stopping.max_tokens, PRINTABLE, request.sampling.seed)


async def generate(channel, request, started=None):
    """Run a request; returns its tokens. `started` counts the requests whose first token has come."""
    tokens = []
    async for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
        if not tokens and started is not None:
            started.release()
        tokens += response.delta.token_ids
    return tokens


async def begin(channel, *requests):
    """Run requests; returns what gathers their tokens, once each has its first."""
    started = asyncio.Semaphore(0)
    running = asyncio.gather(*(generate(channel, request, started) for request in requests))
    for _ in requests:
        await started.acquire()
    return running


async def check_health(port, service="paceline.v1.InferenceService"):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_sigterm_under_load_loses_no_request():
    """32 streams are under way: each gets all of its tokens, then the process ends with 0."""
    async with deployment("--shutdown-timeout", "60") as (executor, process, channel):
        requests = [a_request(number, 40 + number) for number in range(32)]
        running = await begin(channel, *requests)
        process.signal(signal.SIGTERM)
        await process.event("draining")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(channel, a_request(99, 1))
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await running == [expected(request) for request in requests]
        assert await process.ended() == (0, "")
        assert process.names()[-1] == "stopped"
        assert executor.table.num_rows_in_use == 0, "the executor heard how the last ones ended"


async def test_a_session_is_told_of_the_drain_and_gets_the_rest_of_its_output():
    """The stream ends by itself, in good order, when its last request is done."""
    async with deployment("--shutdown-timeout", "60") as (_, process, channel):
        requests = [a_request(number, 50) for number in range(4)]
        session = inference_pb2_grpc.InferenceServiceStub(channel).Session()
        for request in requests:
            await session.write(inference_pb2.SessionRequest(generate=request))
        tokens = {request.request_id: [] for request in requests}
        was_told = False
        async for response in session:
            for delta in response.deltas:
                tokens[delta.request_id] += delta.delta.token_ids
            if response.deltas and all(tokens.values()) and "draining" not in process.names():
                process.signal(signal.SIGTERM)
                await process.event("draining")
            was_told = was_told or response.HasField("drain")
        assert was_told
        assert tokens == {request.request_id: expected(request) for request in requests}
        assert await session.code() is grpc.StatusCode.OK
        assert (await process.ended())[0] == 0


async def test_requests_that_outlast_the_shutdown_timeout_are_given_up_with_a_hint():
    async with deployment("--shutdown-timeout", "0.2", step_ms=40.0) as (executor, process, channel):
        running = await begin(channel, a_request(1, 1000))
        process.signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as end:
            await running
        assert end.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in end.value.details()
        code, _ = await process.ended()
        assert code == 6
        assert executor.table.num_rows_in_use == 1, "the executor keeps what another scheduler may go on with"


async def test_a_process_that_drains_tells_how_many_requests_it_waits_for_until_a_second_signal():
    async with deployment("--shutdown-timeout", "3600", step_ms=40.0) as (_, process, channel):
        running = await begin(channel, a_request(1, 20), a_request(2, 1000))
        process.signal(signal.SIGTERM)
        assert (await process.event("draining"))["num_requests"] == 2
        assert (await process.event("still_running"))["num_requests"] == 1
        process.signal(signal.SIGINT)
        assert (await process.ended())[0] == 6
        with pytest.raises(grpc.aio.AioRpcError):
            await running


async def test_health_follows_the_executors_on_every_port():
    async with deployment() as (executor, process, _):
        ports = await process.event("listening")
        for port in (ports["port"], ports["admin_port"], ports["health_port"]):
            assert await check_health(port) == SERVING
            assert await check_health(port, "") == SERVING
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['health_port']}") as probes:
            request = health_pb2.HealthCheckRequest(service="paceline.v1.InferenceService")
            watch = health_pb2_grpc.HealthStub(probes).Watch(request)
            assert (await watch.read()).status == SERVING
            executor.service.plan_streams.drain(Drain("going away", 60.0))
            assert (await watch.read()).status == NOT_SERVING
            await executor.restart()
            assert (await watch.read()).status == SERVING
            process.signal(signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            watch.cancel()
        assert (await process.ended())[0] == 0


async def test_when_the_last_executor_drains_new_requests_are_refused_and_the_log_says_so():
    async with deployment() as (executor, process, channel):
        request = a_request(3, 150)
        running = await begin(channel, request)
        ports = await process.event("listening")
        async with operators_of(process) as operators:
            drain = admin_pb2.DrainExecutorRequest(address=executor.address)
            assert (await operators.DrainExecutor(drain)).num_running_requests == 1
        assert (await process.event("executor_draining"))["address"] == executor.address
        assert "no executor takes new requests" in (await process.event("not_ready"))["reason"]
        assert await check_health(ports["health_port"]) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await generate(channel, a_request(4, 1))
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await running == [expected(request)]


async def test_operators_and_metrics_show_the_executor_and_its_steps():
    async with deployment() as (executor, process, channel):
        ports = await process.event("listening")
        async with operators_of(process) as stub:
            steps = stub.WatchSteps(admin_pb2.WatchStepsRequest())
            listed = await stub.ListExecutors(admin_pb2.ListExecutorsRequest())
            assert listed.scheduler_id == ports["scheduler_id"]
            assert [view.address for view in listed.executors] == [executor.address]
            assert listed.executors[0].blocks.total == NUM_BLOCKS
            await generate(channel, a_request(3, 40))
            step = await steps.read()
            assert (step.address, step.num_rows) == (executor.address, 1)
            steps.cancel()
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["metrics_port"])
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        shown = await asyncio.wait_for(reader.read(), 30)
        writer.close()
    assert b'paceline_generation_tokens_total{model_name="simulated"} 40.0' in shown


# What a machine denies it


async def test_a_log_that_nobody_reads_or_that_is_closed_stalls_nothing():
    async with deployment() as (executor, process, _), operators_of(process) as operator:
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
    async with deployment() as (_, process, channel), contextlib.AsyncExitStack() as strangers:
        assert await generate(channel, request := a_request(1, 20)) == expected(request)
        limit = num_files(process.process_id) + 4
        resource.prlimit(process.process_id, resource.RLIMIT_NOFILE, (limit, limit))
        port = (await process.event("listening"))["port"]
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            strangers.callback(writer.close)
        await wait_until(lambda: num_files(process.process_id) >= limit, GENEROUS_S)
        assert await generate(channel, request) == expected(request)
        await strangers.aclose()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=ANEW) as another:
            assert await generate(another, request) == expected(request)


@pytest.mark.soak
async def test_a_client_that_stands_still_is_noticed_and_its_requests_end_with_their_window():
    """Its connection stays open; nobody else is held up."""
    async with deployment(step_ms=20.0) as (executor, process, channel), contextlib.AsyncExitStack() as stack:
        port = (await process.event("listening"))["port"]
        asking = ("generate", "--raw", "-n", "4", "--max-tokens", "2000", "--target", f"127.0.0.1:{port}", "Tell me")
        other = await stack.enter_async_context(module_process("paceline_cli", *asking))
        table = executor.table
        await wait_until(lambda: table.num_rows_in_use == 4, GENEROUS_S)
        await asyncio.sleep(1)  # for its first heartbeat: of one that never sends any only the transport decides
        other.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(GENEROUS_S):
            await process.event("session_silent")
        assert await generate(channel, request := a_request(1, 20)) == expected(request)
        # Its own row is left by then, the others go on without a listener.
        await wait_until(lambda: table.num_rows_in_use == 4, GENEROUS_S)
        await wait_until(lambda: not table.num_rows_in_use, GENEROUS_S)
        other.send_signal(signal.SIGCONT)
