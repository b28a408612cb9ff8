"""Every way in which a client's stream can end, done to a server over gRPC: what load for leaks is made of.

Each way takes one request from its start to the end of its stream and cancels its calls on every way out: dropped calls
leak inside gRPC.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import cycle

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from paceline.plan.values import RecordId
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline.v1.inference_pb2_grpc import InferenceServiceStub

_TENANT = "leaving"
_NUM_SHORT, _NUM_LONG = 6, 400  # output tokens of a request that is read to its end, and of one that is left
_SOON_S = 0.02
_CHANNEL = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own, which ends with the channel

_Generate = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]
_Session = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]


@dataclass(frozen=True, slots=True)
class Visitor:
    """`channel` is a connection that many share, `address` to make one of its own."""

    address: str
    channel: grpc.aio.Channel


Way = Callable[[Visitor, str], Awaitable[None]]


def ways() -> Mapping[str, Way]:
    """By its name; each is called with a visitor and an id that no other request has."""
    return {way.__name__: way for way in _WAYS}


async def leave_often(address: str, num_streams: int, num_at_once: int = 32) -> tuple[RecordId, ...]:
    """Takes every way in turn; returns the keys. Raises what no way expects."""
    keys: list[RecordId] = []
    async with grpc.aio.insecure_channel(address, options=_CHANNEL) as channel:
        visitor = Visitor(address, channel)
        streams = zip(range(num_streams), cycle(_WAYS), strict=False)

        async def work() -> None:
            for number, way in streams:
                keys.append(RecordId(_TENANT, f"{way.__name__}-{number}"))
                await way(visitor, keys[-1].request_id)

        async with asyncio.TaskGroup() as workers:
            for _ in range(num_at_once):
                workers.create_task(work())
    return tuple(keys)


async def read_to_the_end(visitor: Visitor, request_id: str) -> None:
    with _generating(visitor, _request(request_id, _NUM_SHORT)) as call:
        await _read_all(call)


async def cancel_at_once(visitor: Visitor, request_id: str) -> None:
    """It may not even have reached the server."""
    with _generating(visitor, _request(request_id, _NUM_LONG)):
        await asyncio.sleep(0)


async def cancel_before_the_first_token(visitor: Visitor, request_id: str) -> None:
    with _generating(visitor, _request(request_id, _NUM_LONG, num_prompt_tokens=300)) as call:
        await call.wait_for_connection()


async def cancel_while_it_decodes(visitor: Visitor, request_id: str) -> None:
    with _generating(visitor, _request(request_id, _NUM_LONG)) as call:
        await call.read()


async def cancel_at_the_last_token(visitor: Visitor, request_id: str) -> None:
    """The end races with the cancellation."""
    with _generating(visitor, _request(request_id, _NUM_SHORT)) as call:
        num_tokens = 0
        while num_tokens < _NUM_SHORT - 1:
            num_tokens += len((await _next_response(call)).delta.token_ids)


async def cancel_by_name(visitor: Visitor, request_id: str) -> None:
    with _generating(visitor, _request(request_id, _NUM_LONG)) as call:
        await call.read()
        await _cancel(visitor, request_id)
        await _read_all(call)


async def let_the_call_run_out_of_time(visitor: Visitor, request_id: str) -> None:
    with _generating(visitor, _request(request_id, _NUM_LONG), timeout_s=_SOON_S) as call, _ending():
        await _read_all(call)


async def let_the_request_run_out_of_time(visitor: Visitor, request_id: str) -> None:
    request = _request(request_id, _NUM_LONG)
    request.timeout.CopyFrom(Duration(nanos=int(_SOON_S * 1e9)))
    with _generating(visitor, request) as call, _ending():
        await _read_all(call)


async def be_refused(visitor: Visitor, request_id: str) -> None:
    with _generating(visitor, _request(request_id, 0)) as call, _ending():
        await _read_all(call)


async def drop_the_connection(visitor: Visitor, request_id: str) -> None:
    async with grpc.aio.insecure_channel(visitor.address, options=_CHANNEL) as channel:
        own = Visitor(visitor.address, channel)
        with _generating(own, _request(request_id, _NUM_LONG)) as call:
            await call.read()
            await channel.close()


async def detach_and_cancel_by_name(visitor: Visitor, request_id: str) -> None:
    with _generating(visitor, _request(request_id, _NUM_LONG, resumable=True)) as call:
        await call.read()
    await _cancel(visitor, request_id)


async def detach_and_come_back(visitor: Visitor, request_id: str) -> None:
    with _generating(visitor, _request(request_id, _NUM_LONG // 10, resumable=True)) as call:
        first = (await _next_response(call)).delta
    again = _request(request_id, _NUM_LONG // 10, resumable=True)
    again.attachment, again.resume_from, again.resume_hash = 2, len(first.token_ids), first.rolling_hash
    again.prior_output_token_ids.extend(first.token_ids)
    with _generating(visitor, again) as call:
        await _read_all(call)


async def end_a_session_in_order(visitor: Visitor, request_id: str) -> None:
    async with _session(visitor, _request(request_id, _NUM_SHORT)) as session:
        await _read_until_finished(session)
        acknowledge = pb.Acknowledge(request_ids=[request_id])
        await session.write(pb.SessionRequest(acknowledge=acknowledge))
        await session.done_writing()
        await _read_all(session)


async def cancel_a_session(visitor: Visitor, request_id: str) -> None:
    async with _session(visitor, _request(request_id, _NUM_LONG)) as session:
        await _read_until_begun(session)


async def cancel_inside_a_session(visitor: Visitor, request_id: str) -> None:
    async with _session(visitor, _request(request_id, _NUM_LONG)) as session:
        await _read_until_begun(session)
        await session.write(pb.SessionRequest(cancel=pb.CancelRequest(tenant=_TENANT, request_id=request_id)))
        await _read_until_finished(session)


async def drop_the_connection_of_a_session(visitor: Visitor, request_id: str) -> None:
    async with grpc.aio.insecure_channel(visitor.address, options=_CHANNEL) as channel:
        own = Visitor(visitor.address, channel)
        async with _session(own, _request(request_id, _NUM_LONG, resumable=True)) as session:
            await _read_until_begun(session)
            await channel.close()
    await _cancel(visitor, request_id)


_WAYS: tuple[Way, ...] = (
    read_to_the_end,
    cancel_at_once,
    cancel_before_the_first_token,
    cancel_while_it_decodes,
    cancel_at_the_last_token,
    cancel_by_name,
    let_the_call_run_out_of_time,
    let_the_request_run_out_of_time,
    be_refused,
    drop_the_connection,
    detach_and_cancel_by_name,
    detach_and_come_back,
    end_a_session_in_order,
    cancel_a_session,
    cancel_inside_a_session,
    drop_the_connection_of_a_session,
)


def _request(
    request_id: str, max_tokens: int, *, num_prompt_tokens: int = 3, resumable: bool = False
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tenant=_TENANT,
        request_id=request_id,
        token_ids=pb.TokenIds(ids=[1 + number % 200 for number in range(num_prompt_tokens)]),
        sampling=sampling_pb2.SamplingParams(seed=1),
        stopping=sampling_pb2.StoppingParams(max_tokens=max_tokens),
        resumable=resumable,
    )


@contextmanager
def _generating(visitor: Visitor, request: pb.GenerateRequest, timeout_s: float | None = None) -> Iterator[_Generate]:
    call = InferenceServiceStub(visitor.channel).Generate(request, timeout=timeout_s)
    try:
        yield call
    finally:
        call.cancel()


@asynccontextmanager
async def _session(visitor: Visitor, request: pb.GenerateRequest) -> AsyncIterator[_Session]:
    session = InferenceServiceStub(visitor.channel).Session()
    try:
        await session.write(pb.SessionRequest(generate=request))
        yield session
    finally:
        session.cancel()


async def _read_all(call: _Generate | _Session) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def _read_until_begun(session: _Session) -> None:
    while not (await _next(session)).deltas:
        pass


async def _read_until_finished(session: _Session) -> None:
    while not any(delta.delta.HasField("finish") for delta in (await _next(session)).deltas):
        pass


async def _next_response(call: _Generate) -> pb.GenerateResponse:
    response = await call.read()
    assert isinstance(response, pb.GenerateResponse), "a call does not end before its request"
    return response


async def _next(session: _Session) -> pb.SessionResponse:
    response = await session.read()
    assert isinstance(response, pb.SessionResponse), "a session does not end before its request"
    return response


async def _cancel(visitor: Visitor, request_id: str) -> None:
    with _ending(grpc.StatusCode.NOT_FOUND):
        await InferenceServiceStub(visitor.channel).Cancel(pb.CancelRequest(tenant=_TENANT, request_id=request_id))


@contextmanager
def _ending(*codes: grpc.StatusCode) -> Iterator[None]:
    """Other requests are refused or late."""
    taken = codes or (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INVALID_ARGUMENT)
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() not in taken:
            raise
