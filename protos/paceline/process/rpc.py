"""The outermost interceptor of a gRPC server: it admits calls, turns errors into statuses and lets no other text out.

It closes a handler's generator as soon as its call is over: the garbage collector would do so late.
"""

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from paceline.process.statuses import ErrorStatus, trailing_metadata

OPEN_TO_ALL = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""How methods begin that anybody may call."""

Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Any  # the stubs know a handler of unary calls only
_FACTORIES: dict[str, Callable[..., _Handler]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Call:
    """`message` is one request, or a stream of them; None before it is read."""

    method: str
    context: Context
    has_many_answers: bool
    message: object = None


class CallGuard(grpc.aio.ServerInterceptor):
    """Handlers are coroutines or asynchronous generators. Answers of `bytes_methods` are sent as they are."""

    expected: ClassVar[tuple[type[Exception], ...]]
    """Errors raised on purpose; others are logged."""

    def __init__(self, bytes_methods: frozenset[str] = frozenset()) -> None:
        self._bytes_methods = bytes_methods

    @abstractmethod
    def admitted(self, call: Call) -> AbstractContextManager[None]:
        """The block is the call. Raises one of `expected` for a call that is refused."""

    @abstractmethod
    def malformed(self, error: DecodeError) -> Exception:
        """Return what is raised for bytes that are no request of the call."""

    @abstractmethod
    def describe(self, error: BaseException) -> ErrorStatus:
        """Of an error that is not expected it shows nothing."""

    def about(self, call: Call) -> Mapping[str, str]:  # noqa: ARG002
        """What log lines say of a call beside its method."""
        return {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC answers unknown methods itself
            return None
        kind = next(kind for kind in _FACTORIES if getattr(handler, kind) is not None)
        method = handler_call_details.method
        # gRPC would answer bytes that are no message with a traceback.
        return _FACTORIES[kind](
            self._guarded(handler, getattr(handler, kind), method),
            request_deserializer=None,
            response_serializer=None if method in self._bytes_methods else handler.response_serializer,
        )

    def _guarded(self, handler: _Handler, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        decode = self._decode_each if handler.request_streaming else self._decode

        async def guarded(request: Any, context: Context) -> object:  # noqa: ANN401  bytes, or a stream of them
            call = Call(method, context, handler.response_streaming)
            async with self._errors_as_status(call):
                with self.admitted(call):
                    call.message = decode(handler.request_deserializer, request)
                    answers = behaviour(call.message, context)
                    if inspect.isawaitable(answers):
                        return await answers
                    async with aclosing(answers) as responses:
                        async for response in responses:
                            await context.write(response)
            return None

        return guarded

    def _decode(self, deserialize: Callable[[bytes], object], data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise self.malformed(error) from error

    async def _decode_each(
        self, deserialize: Callable[[bytes], object], messages: AsyncIterator[bytes]
    ) -> AsyncIterator[object]:
        async for data in messages:
            yield self._decode(deserialize, data)

    @asynccontextmanager
    async def _errors_as_status(self, call: Call) -> AsyncIterator[None]:
        context = call.context
        try:
            yield
        except grpc.aio.AbortError:
            raise
        except self.expected as error:
            await self._abort(call, error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC would leave the client waiting.
            _log.exception("call_failed", method=call.method, **self.about(call))
            await self._abort(call, error)
        except Exception as error:
            # gRPC's InternalError is a write to a connection that broke.
            if isinstance(error, grpc.aio.InternalError) or context.done() or context.cancelled():
                _log.debug("call_ended_by_client", method=call.method, **self.about(call))
                return
            _log.exception("call_failed", method=call.method, **self.about(call))
            await self._abort(call, error)

    async def _abort(self, call: Call, error: BaseException) -> None:
        status = self.describe(error)
        await call.context.abort(status.code, status.message, trailing_metadata(status))
