"""The outermost interceptor: errors leave every call as google.rpc statuses, and mistakes leave no text.

Knows calls, not services. A typed error becomes its status; anything else is logged here and reported as INTERNAL.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from grpc_status import rpc_status

from paceline_executor.errors import RequestError, ServiceError
from paceline_executor.link.status import internal_status, status_of

_Handler = Any  # the stubs know a handler of unary calls only
_Behaviour = Callable[[Any, Any], Any]
_Context = grpc.aio.ServicerContext[Any, Any]

_FACTORIES: dict[str, Callable[..., _Handler]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the behaviour of every handler."""

    def __init__(self) -> None:
        self._log = structlog.get_logger()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """The handler of the call, wrapped; None for a method that nobody answers."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = next(kind for kind in _FACTORIES if getattr(handler, kind) is not None)
        behaviour = getattr(handler, kind)
        wrap = self._wrap_generator if inspect.isasyncgenfunction(behaviour) else self._wrap_coroutine
        return _FACTORIES[kind](
            wrap(behaviour, handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _wrap_coroutine(self, behaviour: _Behaviour, method: str) -> _Behaviour:
        async def wrapped(request: object, context: _Context) -> object:
            try:
                return await behaviour(request, context)
            except Exception as error:
                await self._abort(context, method, error)

        return wrapped

    def _wrap_generator(self, behaviour: _Behaviour, method: str) -> _Behaviour:
        async def wrapped(request: object, context: _Context) -> AsyncIterator[object]:
            try:
                async for response in behaviour(request, context):
                    yield response
            except Exception as error:
                await self._abort(context, method, error)

        return wrapped

    async def _abort(self, context: _Context, method: str, error: Exception) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, ServiceError | RequestError):
            status = status_of(error)
        else:
            self._log.error("call_failed", method=method, exc_info=error)
            status = internal_status()
        await context.abort_with_status(rpc_status.to_status(status))
