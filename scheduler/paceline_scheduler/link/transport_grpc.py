"""The link's transport over gRPC. Messages are bytes that `wire` understands."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from paceline.plan.codec import decode_response, encode_request
from paceline.plan.codec.columns import MalformedError
from paceline.plan.codec.tokenizers import TokenizerParts
from paceline.plan.texts import readable
from paceline.plan.values import BatchPlan, ExecutorInfo, FromExecutor, ToExecutor
from paceline.process.callers import channel_credentials
from paceline.process.tls_folder import TlsFolder
from paceline_scheduler.errors import LinkError, StreamEndedError, UnreachableError
from paceline_scheduler.link import wire
from paceline_scheduler.link.wire_contexts import with_contexts

MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # the prompts of a plan's new requests, at most
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
_MAX_TOKENIZER_PARTS = MAX_TOKENIZER_BYTES // (512 * 1024)
_DETAILS_KEY = "grpc-status-details-bin"

_CHANNEL_OPTIONS = (
    # A shared subchannel would still be backing off.
    ("grpc.use_local_subchannel_pool", 1),
    # No proxy lies between neighbours.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Heartbeats notice a silent peer; pings keep what lies in between from forgetting the connection.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

_Unary = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
_Stream = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
_CALL_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError)
_AttachCall = grpc.aio.StreamStreamCall[bytes, bytes]


class GrpcTransport:
    """Each connection reads the certificates anew.

    `name_of` says whose certificate is expected, where that is not the address.
    """

    def __init__(self, tls: TlsFolder | None = None, name_of: Callable[[str], str | None] = lambda _: None) -> None:
        self._tls = tls
        self._name_of = name_of

    def connect(self, address: str) -> "GrpcConnection":
        if self._tls is None:
            return GrpcConnection(grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS))
        name = self._name_of(address)
        expected = () if name is None else (("grpc.ssl_target_name_override", name),)
        credentials = channel_credentials(self._tls)
        return GrpcConnection(grpc.aio.secure_channel(address, credentials, options=(*_CHANNEL_OPTIONS, *expected)))


class GrpcConnection:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def get_info(self, timeout_s: float) -> ExecutorInfo:
        """A refused connection is an UnreachableError."""
        method: _Unary = self._channel.unary_unary(wire.GET_INFO_METHOD)
        call = method(wire.GET_INFO_REQUEST, timeout=timeout_s)
        async with _ended(call):
            try:
                return wire.decode_info(await call)
            except grpc.aio.AioRpcError as error:
                # Before anything was said nobody listens.
                if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
                    raise UnreachableError(_sentence(error)) from error
                raise _link_error(error) from error

    async def get_tokenizer(self, timeout_s: float) -> bytes:
        method: _Stream = self._channel.unary_stream(wire.GET_TOKENIZER_METHOD)
        call = method(wire.GET_TOKENIZER_REQUEST, timeout=timeout_s)
        parts = TokenizerParts()
        async with _ended(call):
            try:
                async for data in call:
                    if wire.add_tokenizer_part(parts, data):
                        return parts.content()
                    if parts.num_bytes > MAX_TOKENIZER_BYTES or parts.num_parts >= _MAX_TOKENIZER_PARTS:
                        raise StreamEndedError(f"the tokenizer has more than {MAX_TOKENIZER_BYTES} bytes")
            except grpc.aio.AioRpcError as error:
                raise _link_error(error) from error
        raise StreamEndedError("the tokenizer ended before its last part")

    def attach(self) -> "GrpcPlanCall":
        call: _AttachCall = self._channel.stream_stream(wire.ATTACH_METHOD)()
        return GrpcPlanCall(call)

    async def close(self) -> None:
        await self._channel.close()


class GrpcPlanCall:
    def __init__(self, call: _AttachCall) -> None:
        self._call = call
        self._unread: deque[FromExecutor] = deque()

    async def write(self, message: ToExecutor, *more: BatchPlan) -> None:
        data = encode_request(with_contexts(message), *map(with_contexts, more))
        try:
            await self._call.write(data)
        except _CALL_ERRORS as error:
            raise await self._typed(error) from error

    async def read(self) -> FromExecutor:
        while not self._unread:
            try:
                data = await self._call.read()
            except _CALL_ERRORS as error:
                raise await self._typed(error) from error
            if not isinstance(data, bytes):
                raise StreamEndedError("the executor closed the plan stream")
            try:
                self._unread.extend(decode_response(data))
            except MalformedError as error:
                raise wire.divergence(error) from error
        return self._unread.popleft()

    def cancel(self) -> None:
        self._call.cancel()

    async def _typed(self, error: BaseException) -> BaseException:
        match error:
            case grpc.aio.AioRpcError():
                return _link_error(error)
            case asyncio.InvalidStateError():
                # grpc.aio says this of a write after the end.
                return StreamEndedError(readable(f"the plan stream has ended: {await self._call.details()}"))
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            return error
        # grpc.aio raises CancelledError for a call that was cancelled, whoever waits.
        return StreamEndedError("the plan stream was cancelled")


@asynccontextmanager
async def _ended(call: grpc.aio.Call) -> AsyncIterator[None]:
    """An abandoned call would leak."""
    try:
        yield
    finally:
        call.cancel()


def _link_error(error: grpc.aio.AioRpcError) -> LinkError:
    details = (value for key, value in error.trailing_metadata() if key == _DETAILS_KEY)
    found = next(details, None)
    return wire.decode_refusal(_sentence(error), found if isinstance(found, bytes) else None)


def _sentence(error: grpc.aio.AioRpcError) -> str:
    return readable(f"{error.code().name}: {error.details()}")
