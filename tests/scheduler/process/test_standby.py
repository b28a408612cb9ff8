"""Two scheduler processes at one executor: the one that stands by is ready, names the other, and takes over from it."""

import asyncio
import contextlib
import signal

import grpc
import grpc.aio
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge_rig.refusals import refusal_of
from executor_rig.hash_executor import simulated_executor
from executor_rig.hash_runner import continuation
from paceline.bytes_tokenizer import PRINTABLE
from paceline.v1 import admin_pb2, admin_pb2_grpc, executor_pb2, executor_pb2_grpc, inference_pb2, inference_pb2_grpc
from service_processes.logged import SchedulerTestProcess

PROMPT, MAX_TOKENS = (5, 1, 2), 120
EXPECTED = continuation(PROMPT, MAX_TOKENS, PRINTABLE, seed=7)
MAX_WAIT_S = 30


@contextlib.asynccontextmanager
async def pair():
    """Run a simulated executor, a scheduler that drives it, and one that stands by; yields all three."""
    async with simulated_executor() as executor, contextlib.AsyncExitStack() as stack:
        arguments = ("--executors", executor.address, "--standby")
        active = await SchedulerTestProcess.start(*arguments)
        stack.push_async_callback(active.stop)
        await active.event("ready")
        standby = await SchedulerTestProcess.start(*arguments, "--advertise", "standby.example:50051")
        stack.push_async_callback(standby.stop)
        await standby.event("ready")
        yield executor, active, standby


def channel_to(event, port="port"):
    """A channel to a port that a process has told."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{event[port]}")


async def generate(channel, attachment, received=()):
    """Run the request, or come back to it with what was received; yields tokens."""
    request = inference_pb2.GenerateRequest(request_id="r", resumable=True, attachment=attachment)
    request.token_ids.ids.extend(PROMPT)
    request.sampling.seed = 7
    request.stopping.max_tokens = MAX_TOKENS
    request.resume_from = len(received)
    request.prior_output_token_ids.extend(received)
    async for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
        for token_id in response.delta.token_ids:
            yield token_id


async def where_to(call):
    """The status and the reason with which a call is refused, and where it is sent."""
    code, _, details = await refusal_of(call)
    assert 0 < details[RetryInfo].retry_delay.ToMilliseconds() <= 200
    return code, details[ErrorInfo].reason, dict(details[ErrorInfo].metadata)


async def test_a_standby_is_ready_and_sends_clients_to_the_active_scheduler():
    """Health says SERVING, as what comes to it will be served in time; operators and grpcurl users see who drives."""
    async with pair() as (executor, active, standby):
        listening, told = await active.event("listening"), await standby.event("listening")
        address = f"127.0.0.1:{listening['port']}"
        assert (await standby.event("standing_by"))["active_address"] == address
        assert (await standby.event("ready"))["standby"] is True
        async with channel_to(told) as channel, channel_to(told, "admin_port") as operators:
            service = inference_pb2_grpc.InferenceServiceStub(channel)
            elsewhere = grpc.StatusCode.UNAVAILABLE, "STANDBY", {"active_address": address, "active_term": "1"}
            assert await where_to(anext(generate(channel, attachment=1))) == elsewhere
            assert await where_to(service.ListModels(inference_pb2.ListModelsRequest())) == elsewhere
            assert await where_to(service.Tokenize(inference_pb2.TokenizeRequest(text="hi"))) == elsewhere
            assert await where_to(service.Estimate(inference_pb2.EstimateRequest())) == elsewhere
            assert await where_to(service.Explain(inference_pb2.ExplainRequest(request_id="r"))) == elsewhere
            request = health_pb2.HealthCheckRequest(service="paceline.v1.InferenceService")
            health = await health_pb2_grpc.HealthStub(channel).Check(request)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            stub = admin_pb2_grpc.AdminServiceStub(operators)
            (view,) = (await stub.ListExecutors(admin_pb2.ListExecutorsRequest())).executors
            assert (view.holder_address, view.holder_scheduler_id) == (address, listening["scheduler_id"])
        async with grpc.aio.insecure_channel(executor.address) as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            assert (await stub.GetInfo(executor_pb2.GetInfoRequest())).holder_address == address


async def test_a_standby_takes_over_when_the_active_scheduler_is_killed():
    async with pair() as (executor, active, standby), asyncio.timeout(MAX_WAIT_S):
        received = []
        async with channel_to(await active.event("listening")) as channel:
            async with contextlib.aclosing(generate(channel, attachment=1)) as tokens:
                async for token_id in tokens:
                    received.append(token_id)
                    if len(received) == 5:
                        break
            active.signal(signal.SIGKILL)
        assert (await standby.event("ready", lambda event: "models" in event))["models"] == ["simulated"]
        async with channel_to(await standby.event("listening")) as channel:
            received += [token_id async for token_id in generate(channel, 2, tuple(received))]
        assert received == EXPECTED
        assert executor.service.plan_streams.fence.holder.address == "standby.example:50051"
