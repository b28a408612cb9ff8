"""ExecutorService over grpc.aio.

It decides nothing: errors rise to the interceptor.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

import grpc
import structlog

from paceline.plan.codec import decode_request, encode_response
from paceline.plan.codec.bounds import BoundError
from paceline.plan.codec.columns import ColumnError, MalformedError
from paceline.plan.codec.tokenizers import write_parts
from paceline.plan.values import FromExecutor, Hello, StepResult, ToExecutor
from paceline.process.callers import Role, caller_of
from paceline.process.rpc import OPEN_TO_ALL, Context
from paceline.v1 import executor_pb2, executor_pb2_grpc
from paceline_executor.errors import AttachError, NotReadyError, PlanError, PlanFault
from paceline_executor.link.description import Description
from paceline_executor.link.plan_streams import PlanStreams
from paceline_executor.link.profiles import Profiles
from paceline_executor.link.servicer_views import check_state_request, info_of, look_at, state_of
from paceline_executor.link.step_loop import StepLoop
from paceline_executor.link.tokenizer import tokenizer_content

SERVICE_NAME = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name
BYTES_METHODS = frozenset({f"/{SERVICE_NAME}/Attach"})
"""The plan protocol's codec reads their messages, and not gRPC."""

_OF_OPERATORS = frozenset(f"/{SERVICE_NAME}/{name}" for name in ("GetInfo", "GetState", "Profile"))

_BEFORE_PLANS = ("hello.", "heartbeat.")
_STATE_S = 5.0
_LOADING = "the model is still loading; wait until the health service says SERVING"

_log = structlog.get_logger()

_AttachContext = grpc.aio.ServicerContext[bytes, bytes]


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Until `open` it answers with UNAVAILABLE and reason LOADING."""

    def __init__(self, plan_streams: PlanStreams, profiles: Profiles) -> None:
        self._plan_streams = plan_streams
        self._profiles = profiles
        self._loaded: tuple[StepLoop, Description] | None = None

    def open(self, steps: StepLoop, description: Description) -> None:
        self._loaded = (steps, description)
        identity, max_plans = self._plan_streams.identity, self._plan_streams.max_plans_in_flight
        self._plan_streams.open(steps, description.welcome(identity.incarnation, identity.tag_key, max_plans))

    async def Attach(  # type: ignore[override]  # noqa: N802  # the stub has no form for a handler that writes itself
        self,
        request_iterator: object,  # noqa: ARG002
        context: _AttachContext,
    ) -> None:
        """While the model loads the hello is still read: its writer gets an answer, not a reset."""
        await self._plan_streams.serve(GrpcSchedulerConnection(context))

    async def GetInfo(  # noqa: N802
        self,
        request: executor_pb2.GetInfoRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> executor_pb2.GetInfoResponse:
        return info_of(self._plan_streams, *self._require_loaded())

    async def GetState(  # noqa: N802
        self,
        request: executor_pb2.GetStateRequest,
        context: Context,  # noqa: ARG002
    ) -> executor_pb2.GetStateResponse:
        steps, _ = self._require_loaded()
        check_state_request(request)
        try:
            rows = await asyncio.wait_for(steps.ask(look_at), _STATE_S)
        except TimeoutError:
            raise NotReadyError(f"no step has ended for {_STATE_S:g} s, so there is no state to show") from None
        # Writing out many rows takes longer than the event loop has.
        return await asyncio.to_thread(state_of, rows, request)

    async def GetTokenizer(  # noqa: N802
        self,
        request: executor_pb2.GetTokenizerRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[executor_pb2.GetTokenizerResponse]:
        _, description = self._require_loaded()
        for part in write_parts(tokenizer_content(description.tokenizer)):
            yield part

    async def Profile(  # noqa: N802
        self,
        request: executor_pb2.ProfileRequest,
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[executor_pb2.ProfileResponse]:
        steps, _ = self._require_loaded()
        async with contextlib.aclosing(self._profiles.record(steps, request.num_steps)) as parts:
            async for part in parts:
                yield executor_pb2.ProfileResponse(trace=part)

    def _require_loaded(self) -> tuple[StepLoop, Description]:
        if self._loaded is None:
            raise NotReadyError(_LOADING)
        return self._loaded


class GrpcSchedulerConnection:
    def __init__(self, context: _AttachContext) -> None:
        self._context = context
        self._unread: deque[ToExecutor] = deque()

    async def receive(self) -> ToExecutor | None:
        if not self._unread:
            data = await self._context.read()
            if not isinstance(data, bytes):
                return None
            self._unread.extend(_decode(data))
            if isinstance(hello := self._unread[0], Hello) and hello.takeover:
                caller = caller_of(self._context).name
                _log.warning("takeover", scheduler_id=hello.claim.scheduler_id, term=hello.claim.term, caller=caller)
        return self._unread.popleft()

    async def send(self, message: FromExecutor, *more: StepResult) -> None:
        await self._context.write(encode_response(message, *more))


def _decode(data: bytes) -> list[ToExecutor]:
    try:
        return decode_request(data)
    except ColumnError as error:
        raise PlanError(PlanFault.COLUMN_LENGTH, str(error)) from error
    except BoundError as error:
        if error.field.startswith(_BEFORE_PLANS):
            raise AttachError(str(error)) from error
        raise PlanError(PlanFault.OUT_OF_BOUNDS, str(error)) from error
    except MalformedError as error:
        raise AttachError(str(error)) from error


def who_may_call(method: str) -> frozenset[Role] | None:
    """Operators only look. Returns None for health and reflection."""
    if method.startswith(OPEN_TO_ALL):
        return None
    return frozenset({Role.SCHEDULER, Role.OPERATOR} if method in _OF_OPERATORS else {Role.SCHEDULER})


def register(servicer: ExecutorServicer, server: grpc.aio.Server) -> None:
    """The interceptor leaves the messages of `BYTES_METHODS` as bytes."""
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server)
