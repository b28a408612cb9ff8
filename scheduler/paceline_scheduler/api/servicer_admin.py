"""AdminService over gRPC: operators' views, and the few things they may change.

Refuses to know clients' requests.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc.aio
import structlog
from typing_extensions import override

from paceline.v1 import admin_pb2 as pb
from paceline.v1.admin_pb2_grpc import AdminServiceServicer
from paceline_scheduler.api import status, wire
from paceline_scheduler.api.servicer_access import audited, caller
from paceline_scheduler.backend import Backend, Executors
from paceline_scheduler.core.events import DrainExecutor, SetLimits, UndrainExecutor
from paceline_scheduler.errors import InvalidRequestError, UnknownExecutorError, UnsupportedError
from paceline_scheduler.observers.steps import StepRecord, StepWatch

_MAX_WAITING_STEPS = 256
_MAX_ADDRESS_BYTES = 128
_MAX_LIMITS = {"max_num_queued_reqs": 1_000_000, "max_num_queued_tokens": 1 << 40, "max_num_batched_tokens": 1 << 20}

_Context = grpc.aio.ServicerContext[Any, Any]
_log = structlog.get_logger(__name__)


class AdminServicer(AdminServiceServicer):
    def __init__(
        self,
        backend: Backend,
        executors: Executors,
        steps: StepWatch,
        scheduler_id: str,
        num_lost_log_lines: Callable[[], int],
    ) -> None:
        self._backend = backend
        self._executors = executors
        self._steps = steps
        self._scheduler_id = scheduler_id
        self._num_lost_log_lines = num_lost_log_lines

    @override
    async def ListExecutors(self, request: pb.ListExecutorsRequest, context: _Context) -> pb.ListExecutorsResponse:
        num_requests, num_tokens = self._backend.views.num_waiting()
        return pb.ListExecutorsResponse(
            executors=[wire.executor_view(executor) for executor in self._executors.statuses()],
            scheduler_id=self._scheduler_id,
            num_waiting_requests=num_requests,
            num_waiting_tokens=num_tokens,
            num_lost_log_lines=self._num_lost_log_lines(),
        )

    @override
    async def DrainExecutor(self, request: pb.DrainExecutorRequest, context: _Context) -> pb.DrainExecutorResponse:
        address = request.address
        self._check_address(address)
        num_running = self._backend.feed(DrainExecutor(address))
        _log.info("executor_draining", address=address, reason="an operator asked for it", **audited(caller()))
        return pb.DrainExecutorResponse(num_running_requests=num_running)

    @override
    async def UndrainExecutor(
        self, request: pb.UndrainExecutorRequest, context: _Context
    ) -> pb.UndrainExecutorResponse:
        address = request.address
        self._check_address(address)
        self._backend.feed(UndrainExecutor(address))
        _log.info("executor_undrained", address=address, reason="an operator asked for it", **audited(caller()))
        return pb.UndrainExecutorResponse()

    @override
    async def GetLimits(self, request: pb.GetLimitsRequest, context: _Context) -> pb.GetLimitsResponse:
        return pb.GetLimitsResponse(limits=wire.limits(self._backend.views.limits()))

    @override
    async def SetLimits(self, request: pb.SetLimitsRequest, context: _Context) -> pb.SetLimitsResponse:
        limits, current = request.limits, self._backend.views.limits()
        changes = {field.name: _checked(field.name, value) for field, value in limits.ListFields()}
        self._backend.feed(SetLimits(replace(current, **changes)))
        _log.info("limits_set", **changes, **audited(caller()))
        return pb.SetLimitsResponse(limits=wire.limits(self._backend.views.limits()))

    @override
    async def WatchSteps(
        self, request: pb.WatchStepsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchStepsResponse]:
        if request.address:
            self._check_address(request.address)
        watch = _StepWatch(request.address)
        self._steps.add(watch)
        try:
            while True:
                record, num_dropped = await watch.next()
                yield wire.step_response(record, num_dropped)
        finally:
            self._steps.remove(watch)

    @override
    async def SetPlanRecording(
        self, request: pb.SetPlanRecordingRequest, context: _Context
    ) -> pb.SetPlanRecordingResponse:
        call = "AdminService.SetPlanRecording"
        raise UnsupportedError(call, f"{call} is not supported by this version")

    def _check_address(self, address: str) -> None:
        """Raises UnknownExecutorError."""
        known = [executor.address for executor in self._executors.statuses()]
        if address not in known:
            shown = status.cut(address, _MAX_ADDRESS_BYTES)
            raise UnknownExecutorError(f"no executor has the address {shown!r}; known are {', '.join(known) or 'none'}")


class _StepWatch:
    """Keeps the latest steps for one client and counts those it lost."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._waiting: deque[StepRecord] = deque()
        self._num_dropped = 0
        self._filled = asyncio.Event()

    def step_finished(self, record: StepRecord) -> None:
        if self._address and record.address != self._address:
            return
        if len(self._waiting) == _MAX_WAITING_STEPS:
            self._waiting.popleft()
            self._num_dropped += 1
        self._waiting.append(record)
        self._filled.set()

    async def next(self) -> tuple[StepRecord, int]:
        """Returns the oldest step, and how many were lost since the last call."""
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        num_dropped, self._num_dropped = self._num_dropped, 0
        return self._waiting.popleft(), num_dropped


def _checked(name: str, value: int) -> int:
    highest = _MAX_LIMITS.get(name)
    if highest is None:
        raise UnsupportedError(f"limits.{name}")
    if not 1 <= value <= highest:
        raise InvalidRequestError(f"limits.{name}", f"is {value}, must be at least 1 and at most {highest}")
    return value
