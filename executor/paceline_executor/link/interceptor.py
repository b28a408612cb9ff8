"""The outermost interceptor: who may not call is refused, errors leave every call as google.rpc statuses, and mistakes
leave no text.

Anything but a typed error is logged here and reported as INTERNAL.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from paceline.process.callers import Role, caller_of
from paceline.process.log_bounds import OPERATOR
from paceline_executor.errors import MalformedMessageError, NotAllowedError, RequestError, ServiceError
from paceline_executor.link.status import internal_status, status_of

_Handler = Any  # the stubs know a handler of unary calls only
_Behaviour = Callable[[Any, Any], Any]
_Decode = Callable[[Any], Any]
_Context = grpc.aio.ServicerContext[Any, Any]

_FACTORIES: dict[str, Callable[..., _Handler]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


Rules = Callable[[str], frozenset[Role] | None]
"""Who may call `/package.Service/Method`; None: anybody."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Messages of `bytes_methods` pass as they are. Without `rules` anybody may call."""

    def __init__(self, bytes_methods: frozenset[str] = frozenset(), rules: Rules = lambda _: None) -> None:
        self._bytes_methods = bytes_methods
        self._rules = rules
        self._log = structlog.get_logger()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = next(kind for kind in _FACTORIES if getattr(handler, kind) is not None)
        behaviour = getattr(handler, kind)
        wrap = self._wrap_generator if inspect.isasyncgenfunction(behaviour) else self._wrap_coroutine
        method = handler_call_details.method
        # gRPC would answer bytes that are no message with a traceback.
        return _FACTORIES[kind](
            wrap(behaviour, _decoder(handler.request_deserializer), method),
            request_deserializer=None,
            response_serializer=None if method in self._bytes_methods else handler.response_serializer,
        )

    def _wrap_coroutine(self, behaviour: _Behaviour, decode: _Decode, method: str) -> _Behaviour:
        async def wrapped(request: object, context: _Context) -> object:
            try:
                self._admit(context, method)
                return await behaviour(decode(request), context)
            except Exception as error:
                await self._abort(context, method, error)

        return wrapped

    def _wrap_generator(self, behaviour: _Behaviour, decode: _Decode, method: str) -> _Behaviour:
        async def wrapped(request: object, context: _Context) -> AsyncIterator[object]:
            try:
                self._admit(context, method)
                async for response in behaviour(decode(request), context):
                    yield response
            except Exception as error:
                await self._abort(context, method, error)

        return wrapped

    def _admit(self, context: _Context, method: str) -> None:
        allowed = self._rules(method)
        if allowed is None:
            return
        caller = caller_of(context)
        if not caller.roles & allowed:
            self._log.warning("call_refused", method=method, caller=caller.name, peer=context.peer())
            needed = " or ".join(sorted(f"paceline://{role.value}" for role in allowed))
            raise NotAllowedError(f"this call needs a certificate with the URI {needed}", {"method": method})
        if Role.OPERATOR in caller.roles:
            self._log.info("operator_call", method=method, caller=caller.name, by=OPERATOR)

    async def _abort(self, context: _Context, method: str, error: Exception) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, ServiceError | RequestError):
            status = status_of(error)
        else:
            self._log.error("call_failed", method=method, exc_info=error)
            status = internal_status()
        await context.abort_with_status(rpc_status.to_status(status))


def _decoder(deserialize: _Decode) -> _Decode:
    """Decodes a request, or each of a stream of requests."""

    def decode(request: bytes) -> object:
        try:
            return deserialize(request)
        except DecodeError as error:
            raise MalformedMessageError(f"the request is no message of this call: {error}") from error

    async def decode_each(requests: AsyncIterator[bytes]) -> AsyncIterator[object]:
        async for request in requests:
            yield decode(request)

    return lambda given: decode(given) if isinstance(given, bytes) else decode_each(given)
