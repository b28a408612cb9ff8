"""A scheduler's side of the plan stream, as small as it gets.

It sends heartbeats only inside `beating`, since an executor misses them only while somebody is queued. And in grpc.aio
a write that meets the end of its stream replaces the reason of that end by a bare INTERNAL: so nothing is written here
but what the caller asks for.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import numpy as np
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from paceline.v1 import executor_pb2_grpc, inference_pb2, plan_pb2, sampling_pb2

_HEARTBEAT_S = 0.2

if TYPE_CHECKING:  # the class has type parameters in the stubs only
    AttachCall = grpc.aio.StreamStreamCall[plan_pb2.AttachRequest, plan_pb2.AttachResponse]
else:
    AttachCall = grpc.aio.StreamStreamCall


def column(values: Sequence[int]) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def values_of(column: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(column, dtype="<i4")]


def request(
    row: int,
    prompt: Sequence[int],
    *,
    request_id: str = "",
    max_tokens: int = 16,
    end_token_ids: Sequence[int] = (),
    output: Sequence[int] = (),
    num_cached_tokens: int = 0,
    attempt: int = 1,
    sampling: sampling_pb2.SamplingParams | None = None,
    num_logprobs: int | None = None,
) -> plan_pb2.NewRequest:
    return plan_pb2.NewRequest(
        row=row,
        id=plan_pb2.RecordId(request_id=request_id or f"request-{row}"),
        attempt=attempt,
        prompt_token_ids=column(prompt),
        output_token_ids=column(output),
        num_cached_tokens=num_cached_tokens,
        sampling=sampling or sampling_pb2.SamplingParams(temperature=0, seed=0),
        end_token_ids=end_token_ids,
        max_tokens=max_tokens,
        num_logprobs=num_logprobs,
    )


def grants(cells: Sequence[tuple[int, int, int]]) -> plan_pb2.BlockGrants:
    rows, indices, blocks = zip(*cells, strict=True) if cells else ((), (), ())
    return plan_pb2.BlockGrants(rows=column(rows), indices=column(indices), block_ids=column(blocks))


@dataclass(slots=True)
class PlanClient:
    """`step` sends a plan without waiting, `result` takes the next result."""

    call: AttachCall
    welcome: plan_pb2.Welcome
    rows: list[plan_pb2.RowState] = field(default_factory=list)
    tags: dict[int, bytes] = field(default_factory=dict)
    drains: int = 0
    last_step_id: int = 0

    async def step(
        self, scheduled: Sequence[tuple[int, int]] = (), plan: plan_pb2.BatchPlan | None = None
    ) -> plan_pb2.BatchPlan:
        """`plan` gets identities and (row, num_tokens) columns filled in."""
        self.last_step_id += 1
        sent = plan_pb2.BatchPlan()
        if plan is not None:
            sent.CopyFrom(plan)
        sent.incarnation, sent.epoch = self.welcome.incarnation, self.welcome.epoch
        sent.step_id = self.last_step_id
        sent.rows = column([row for row, _ in scheduled])
        sent.num_scheduled_tokens = column([num_tokens for _, num_tokens in scheduled])
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.write(plan_pb2.AttachRequest(plan=sent))
        return sent

    async def result(self) -> plan_pb2.StepResult:
        """Skips heartbeats. Raises the stream's error."""
        while True:
            message = await read(self.call)
            match message.WhichOneof("message"):
                case "result":
                    return message.result
                case "drain":
                    self.drains += 1

    async def run(
        self, scheduled: Sequence[tuple[int, int]] = (), plan: plan_pb2.BatchPlan | None = None
    ) -> plan_pb2.StepResult:
        await self.step(scheduled, plan)
        return await self.result()


def tokens_by_row(result: plan_pb2.StepResult) -> dict[int, list[int]]:
    rows, counts = values_of(result.rows), values_of(result.num_accepted)
    tokens = iter(values_of(result.token_ids))
    return {row: [next(tokens) for _ in range(count)] for row, count in zip(rows, counts, strict=True)}


def info_of(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """Raises LookupError when there is none, which is a mistake of the server."""
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info
    raise LookupError(f"no ErrorInfo in {error!r}")


async def read(
    call: AttachCall,
) -> plan_pb2.AttachResponse:
    """Raises ConnectionError when the stream has ended without an error."""
    message = await call.read()
    if not isinstance(message, plan_pb2.AttachResponse):
        code = await call.code()
        if code is grpc.StatusCode.OK:
            raise ConnectionError("the stream has ended in good order")
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
    return message


@asynccontextmanager
async def beating(call: AttachCall) -> AsyncIterator[None]:
    """Nothing else may be written to the call meanwhile."""
    task = asyncio.create_task(_beat(call))
    try:
        yield
    finally:
        task.cancel()


async def _beat(call: AttachCall) -> None:
    with suppress(grpc.RpcError, asyncio.InvalidStateError):
        while True:
            await call.write(plan_pb2.AttachRequest(heartbeat=inference_pb2.Heartbeat()))
            await asyncio.sleep(_HEARTBEAT_S)


@asynccontextmanager
async def attached(
    address: str, greeting: plan_pb2.Hello | None = None, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[PlanClient]:
    """Waits for welcome and snapshot."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with (
        grpc.aio.insecure_channel(address, options=options)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=options)
    ) as channel:
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Attach()
        await call.write(plan_pb2.AttachRequest(hello=greeting or hello()))
        try:
            yield await _welcomed(call)
        finally:
            call.cancel()


async def attach_until(address: str, kind: str, greeting: plan_pb2.Hello) -> tuple[AttachCall, plan_pb2.AttachResponse]:
    """The caller cancels the call."""
    call = executor_pb2_grpc.ExecutorServiceStub(grpc.aio.insecure_channel(address)).Attach()
    await call.write(plan_pb2.AttachRequest(hello=greeting))
    while (message := await read(call)).WhichOneof("message") != kind:
        pass
    return call, message


def hello(scheduler_id: str = "test", term: int = 1, *, takeover: bool = False, address: str = "") -> plan_pb2.Hello:
    return plan_pb2.Hello(
        scheduler_id=scheduler_id, term=term, min_protocol=1, max_protocol=1, takeover=takeover, address=address
    )


async def _welcomed(call: AttachCall) -> PlanClient:
    client: PlanClient | None = None
    while True:
        message = await read(call)
        match message.WhichOneof("message"):
            case "welcome":
                client = PlanClient(call, message.welcome)
            case "snapshot" if client is not None:
                client.rows += message.snapshot.rows
                client.tags |= _tags(message.snapshot.tags)
                if message.snapshot.num_parts:
                    return client


def _tags(tags: plan_pb2.BlockTags) -> dict[int, bytes]:
    return {block: tags.keys[16 * at : 16 * at + 16] for at, block in enumerate(values_of(tags.block_ids))}
