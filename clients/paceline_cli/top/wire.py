"""AdminService as values: the calls, and their messages read. Decides nothing."""

from collections.abc import AsyncIterator

from paceline.v1 import admin_pb2 as pb
from paceline.v1 import inference_pb2
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline_cli.top.values import (
    ActiveRequest,
    Blocks,
    Executor,
    ExecutorState,
    Overview,
    RequestKey,
    Step,
    Sums,
)
from paceline_client.wire import CallChannel, read_explanation
from paceline_client.wire_requests import set_field

# Of each, so that what runs long leaves room for what waits.
_LISTS = (
    (inference_pb2.REQUEST_STATE_RUNNING, inference_pb2.REQUEST_STATE_FINISHED),
    (inference_pb2.REQUEST_STATE_WAITING, inference_pb2.REQUEST_STATE_PREEMPTED),
)
_MAX_REQUESTS = 100
_EXECUTOR_STATES = {
    pb.EXECUTOR_STATE_CONNECTING: ExecutorState.CONNECTING,
    pb.EXECUTOR_STATE_SYNCING: ExecutorState.SYNCING,
    pb.EXECUTOR_STATE_READY: ExecutorState.READY,
    pb.EXECUTOR_STATE_DRAINING: ExecutorState.DRAINING,
    pb.EXECUTOR_STATE_LOST: ExecutorState.LOST,
}
LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens", "max_num_batched_tokens")
"""Names of the bounds that can be changed while a scheduler runs."""


async def overview(on: CallChannel, timeout_seconds: float) -> Overview:
    stub = AdminServiceStub(on.channel)
    executors = await stub.ListExecutors(pb.ListExecutorsRequest(), timeout=timeout_seconds, metadata=on.metadata())
    listed = [
        await stub.ListRequests(
            pb.ListRequestsRequest(page_size=_MAX_REQUESTS, states=states),
            timeout=timeout_seconds,
            metadata=on.metadata(),
        )
        for states in _LISTS
    ]
    return Overview(
        scheduler_id=executors.scheduler_id,
        executors=tuple(_read_executor(executor) for executor in executors.executors),
        requests=tuple(_read_request(request) for part in listed for request in part.requests),
        has_more=any(part.next_page_token for part in listed),
        num_waiting_requests=executors.num_waiting_requests,
        num_waiting_tokens=executors.num_waiting_tokens,
        refusals=dict(executors.num_refusals),
        recoveries=dict(executors.num_recoveries),
    )


async def steps(on: CallChannel) -> AsyncIterator[Step]:
    """Until the call fails, with grpc.aio.AioRpcError."""
    async for message in AdminServiceStub(on.channel).WatchSteps(pb.WatchStepsRequest(), metadata=on.metadata()):
        gaps = zip(message.between_tokens_ns, message.num_between_tokens, strict=False)
        yield Step(
            first_tokens_s=tuple(ns / 1e9 for ns in message.first_token_ns),
            gaps_s=tuple((ns / 1e9, count) for ns, count in gaps),
            num_dropped=message.num_dropped,
        )


async def drain(on: CallChannel, address: str, timeout_seconds: float) -> int:
    """Return how many requests still run there."""
    request = pb.DrainExecutorRequest(address=address)
    answer = await AdminServiceStub(on.channel).DrainExecutor(request, timeout=timeout_seconds, metadata=on.metadata())
    return answer.num_running_requests


async def undrain(on: CallChannel, address: str, timeout_seconds: float) -> None:
    request = pb.UndrainExecutorRequest(address=address)
    await AdminServiceStub(on.channel).UndrainExecutor(request, timeout=timeout_seconds, metadata=on.metadata())


async def get_limits(on: CallChannel, timeout_seconds: float) -> dict[str, int]:
    answer = await AdminServiceStub(on.channel).GetLimits(
        pb.GetLimitsRequest(), timeout=timeout_seconds, metadata=on.metadata()
    )
    return _read_limits(answer.limits)


async def set_limit(on: CallChannel, name: str, value: int, timeout_seconds: float) -> dict[str, int]:
    """Change the bound of this name. InvalidRequestError for a value that has no place in a message."""
    request = pb.SetLimitsRequest()
    set_field(request.limits, name, value, "limits.")
    answer = await AdminServiceStub(on.channel).SetLimits(request, timeout=timeout_seconds, metadata=on.metadata())
    return _read_limits(answer.limits)


def _read_limits(limits: pb.Limits) -> dict[str, int]:
    return {name: getattr(limits, name) for name in LIMITS}


def _read_executor(executor: pb.ExecutorView) -> Executor:
    blocks = executor.blocks
    return Executor(
        address=executor.address,
        state=_EXECUTOR_STATES.get(executor.state, ExecutorState.UNKNOWN),
        model=executor.model,
        num_rows=executor.num_running_requests,
        max_num_rows=executor.max_num_rows,
        blocks=Blocks(blocks.total, blocks.free, blocks.cached, blocks.used),
        sums=_read_sums(executor.steps),
        draft_speedup=executor.draft_speedup,
        last_error=executor.last_error,
        holder=executor.holder_address or executor.holder_scheduler_id,
        lost_for_s=executor.lost_for.ToNanoseconds() / 1e9 if executor.HasField("lost_for") else None,
        num_ranks=executor.num_ranks,
    )


def _read_sums(steps: pb.StepTotals) -> Sums:
    timings = steps.timings
    return Sums(
        num_steps=steps.num_steps,
        num_output_tokens=steps.num_output_tokens,
        busy_s=(timings.prepare_ns + timings.forward_ns + timings.sample_ns + timings.draft_ns) / 1e9,
        predicted_s=steps.predicted_ns / 1e9,
        planning_s=steps.planning_ns / 1e9,
        starved_s=steps.starved_ns / 1e9,
        num_drafts=steps.num_draft_tokens,
        num_accepted_drafts=steps.num_accepted_draft_tokens,
    )


def _read_request(request: pb.RequestView) -> ActiveRequest:
    return ActiveRequest(
        key=RequestKey(request.tenant, request.request_id, request.index),
        explanation=read_explanation(request.explanation),
        model=request.model,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        age_s=request.age.ToNanoseconds() / 1e9,
        has_listener=request.has_listener,
    )
