"""Every call of a service, made without generated code: for tests of what must hold for all of them."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FileDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from paceline.v1.inference_pb2 import SessionResponse

Outcome = tuple[grpc.StatusCode, str]
"""A code and the reason of its details; OK for a call that goes on."""

UNAUTHENTICATED: Outcome = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
DENIED: Outcome = (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
# A stream that is refused has ended by the time that the same server has answered calls made after it, and some more: a
# time alone would take a slow refusal for an acceptance.
_NUM_LATER_CALLS = 5
_PATIENCE_S = 0.3
_UNARY_S = 120.0
# What grpc.aio makes of the end of a stream that a write meets; so the call is made again.
_END_MET_BY_A_WRITE: Outcome = (grpc.StatusCode.INTERNAL, "")
_MAX_TRIES = 5
_MAX_DEPTH = 3


def methods_of(*files: FileDescriptor) -> list[MethodDescriptor]:
    return [
        method
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods_by_name.values()
    ]


def tenant_fields(method: MethodDescriptor) -> Iterator[tuple[str, ...]]:
    """Yield the paths to the tenants that a message of a method names."""
    yield from _tenant_fields(method.input_type, ())


def _tenant_fields(descriptor: Descriptor, prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for field in descriptor.fields:
        if field.is_repeated:
            continue
        if field.name == "tenant":
            yield (*prefix, field.name)
        elif field.message_type is not None and len(prefix) < _MAX_DEPTH:
            yield from _tenant_fields(field.message_type, (*prefix, field.name))


def message_about(method: MethodDescriptor, path: tuple[str, ...], tenant: str) -> Message:
    message = part = GetMessageClass(method.input_type)()
    for name in path[:-1]:
        part = getattr(part, name)
        part.SetInParent()
    setattr(part, path[-1], tenant)
    return message


async def outcome(
    channel: grpc.aio.Channel, method: MethodDescriptor, *, token: str = "", message: Message | bytes | None = None
) -> Outcome:
    """Make a call with a message or its bytes, by default an empty one, and return what became of it; of a session, of
    what it was asked first.
    """
    if message is None:
        message = GetMessageClass(method.input_type)()
    data = message if isinstance(message, bytes) else message.SerializeToString()
    for _ in range(_MAX_TRIES - 1):
        became = await _outcome(channel, method, token, data)
        if not method.client_streaming or became != _END_MET_BY_A_WRITE:
            return became
    return await _outcome(channel, method, token, data)


async def _outcome(channel: grpc.aio.Channel, method: MethodDescriptor, token: str, data: bytes) -> Outcome:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    call = _start(channel, method, data, metadata)
    end = asyncio.ensure_future(_end_of(call, method, data))
    try:
        if method.server_streaming:
            for _ in range(_NUM_LATER_CALLS):
                await _answered(channel)
            await asyncio.wait((end,), timeout=_PATIENCE_S)
            return end.result() if end.done() else (grpc.StatusCode.OK, "")
        return await asyncio.wait_for(end, _UNARY_S)
    finally:
        end.cancel()
        call.cancel()


async def _end_of(call: Any, method: MethodDescriptor, data: bytes) -> Outcome:  # noqa: ANN401  a call of any kind
    try:
        if method.client_streaming:
            await call.write(data)
        if not method.server_streaming:
            await call
        elif (answer := await call.read()) is grpc.aio.EOF:
            return await ended(call)
        elif method.name == "Session":
            return await _first_failure(call, answer)
    except grpc.aio.AioRpcError as error:
        return error.code(), _reason(error.trailing_metadata())
    return grpc.StatusCode.OK, ""


async def _answered(channel: grpc.aio.Channel) -> None:
    call: Any = channel.unary_unary("/no.such.Service/Call")
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call(b"")


async def ended(call: Any) -> Outcome:  # noqa: ANN401  a call of any kind
    return await call.code(), _reason(await call.trailing_metadata())


def _start(
    channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes, metadata: tuple[tuple[str, str], ...]
) -> Any:  # noqa: ANN401  as above
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        return channel.stream_stream(path)(metadata=metadata)
    start: Any = channel.unary_stream(path) if method.server_streaming else channel.unary_unary(path)
    return start(data, metadata=metadata)


async def _first_failure(call: Any, answer: bytes) -> Outcome:  # noqa: ANN401  as above
    while not (failures := SessionResponse.FromString(answer).failures):
        answer = await call.read()
    code = next(code for code in grpc.StatusCode if code.value[0] == failures[0].error.code)
    return code, ErrorInfo.FromString(failures[0].error.details[0].value).reason


def _reason(trailing_metadata: Any) -> str:  # noqa: ANN401  grpc.aio has several types for it
    packed = dict(trailing_metadata or ()).get("grpc-status-details-bin")
    return "" if packed is None else ErrorInfo.FromString(Status.FromString(packed).details[0].value).reason
