"""What every gRPC server of the scheduler has: its options, and the outermost interceptor.

The interceptor asks who calls, turns errors into statuses and lets no other text out. It closes a handler's generator
as soon as its call is over: the garbage collector would do so late.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from paceline.process import ports
from paceline.process.trace_ids import trace_fields
from paceline_scheduler.api import status
from paceline_scheduler.api.call_spans import CallSpans
from paceline_scheduler.api.servicer_access import Access
from paceline_scheduler.errors import InvalidRequestError, SchedulerError

MAX_MESSAGE_BYTES = 4 * 1024 * 1024

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *ports.SERVER_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Who connects and says nothing keeps a descriptor, by default for two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Against opening and resetting streams in a loop. A session carries any number of requests.
    ("grpc.max_concurrent_streams", 1024),
    # Frequent pings are not punished.
    ("grpc.http2.max_pings_without_data", 0),
)

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Decode = Callable[[Any], Any]
_log = structlog.get_logger(__name__)


class Guard(grpc.aio.ServerInterceptor):
    """Handlers are coroutines or asynchronous generators."""

    def __init__(self, access: Access | None = None, calls: CallSpans | None = None) -> None:
        self._access = access or Access()
        self._calls = calls or CallSpans()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC answers unknown methods itself
            return handler
        decode, method, encode = handler.request_deserializer, handler_call_details.method, handler.response_serializer
        assert decode is not None, "generated services name it"
        decode_request = _decode_stream(decode) if handler.request_streaming else _decode_message(decode)
        # gRPC would answer bytes that are no message with a traceback.
        if handler.request_streaming and handler.response_streaming:
            guarded = self._streaming(handler.stream_stream, decode_request, method)
            return grpc.stream_stream_rpc_method_handler(guarded, None, encode)
        if handler.response_streaming:
            guarded = self._streaming(handler.unary_stream, decode_request, method)
            return grpc.unary_stream_rpc_method_handler(guarded, None, encode)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(
                self._unary(handler.stream_unary, decode_request, method), None, encode
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(handler.unary_unary, decode_request, method), None, encode
        )

    def _unary(self, behaviour: Callable[..., Any] | None, decode: _Decode, method: str) -> Callable[..., Any]:
        assert behaviour is not None, "a handler has the behaviour of its kind"

        async def guarded(request: object, context: _Context) -> object:
            about = _About(method)
            async with _errors_as_status(context, about):
                with (
                    self._calls.of(method, context.invocation_metadata() or ()),
                    self._access.admitted(method, context),
                ):
                    about.message = decode(request)
                    return await behaviour(about.message, context)

        return guarded

    def _streaming(self, behaviour: Callable[..., Any] | None, decode: _Decode, method: str) -> Callable[..., Any]:
        assert behaviour is not None, "a handler has the behaviour of its kind"

        async def guarded(request: object, context: _Context) -> None:
            about = _About(method)
            async with _errors_as_status(context, about):
                with self._access.admitted(method, context):
                    about.message = decode(request)
                    answers = behaviour(about.message, context)
                    if inspect.isawaitable(answers):
                        await answers
                        return
                    async with aclosing(answers) as responses:
                        async for response in responses:
                            await context.write(response)

        return guarded


def _decode_message(decode: _Decode) -> Callable[[bytes], Any]:
    def decoded(data: bytes) -> object:
        try:
            return decode(data)
        except DecodeError as error:
            raise InvalidRequestError(
                "message", "is not a message of this call; generate the stubs from the protos of this release"
            ) from error

    return decoded


def _decode_stream(decode: _Decode) -> Callable[[AsyncIterator[bytes]], AsyncIterator[Any]]:
    decode_message = _decode_message(decode)

    async def decoded(messages: AsyncIterator[bytes]) -> AsyncIterator[object]:
        async for data in messages:
            yield decode_message(data)

    return decoded


@dataclass(slots=True)
class _About:
    """What lines say of a call; `message` is one request, or a stream of them."""

    method: str
    message: object = None

    def fields(self) -> dict[str, str]:
        request_id, tenant = (getattr(self.message, name, "") for name in ("request_id", "tenant"))
        names = {"request_id": request_id, "tenant": tenant} if request_id else {}
        return {"method": self.method, **names, **trace_fields(getattr(self.message, "trace_parent", ""))}


@asynccontextmanager
async def _errors_as_status(context: _Context, about: _About) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except SchedulerError as error:
        await _abort(context, status.describe(error))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # gRPC would leave the client waiting.
        _log.exception("call_failed", **about.fields())
        await _abort(context, status.describe(Exception()))
    except Exception as error:
        # gRPC's InternalError is a write to a connection that broke.
        if isinstance(error, grpc.aio.InternalError) or context.done() or context.cancelled():
            _log.debug("call_ended_by_client", **about.fields())
            return
        _log.exception("call_failed", **about.fields())
        await _abort(context, status.describe(error))


async def _abort(context: _Context, described: status.ErrorStatus) -> None:
    await context.abort(described.code, described.message, status.trailing_metadata(described))
