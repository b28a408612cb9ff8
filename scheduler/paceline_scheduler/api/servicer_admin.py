"""AdminService over gRPC: operators' views, and the few things they may change.

Refuses to know clients' requests.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import structlog
from typing_extensions import override

from paceline.process.metrics import Meter
from paceline.v1 import admin_pb2 as pb
from paceline.v1.admin_pb2_grpc import AdminServiceServicer
from paceline_scheduler.access.tenant_limits import MAX_LIMIT, NO_LIMITS, TenantBounds, TenantLimits
from paceline_scheduler.api import status, wire
from paceline_scheduler.api.servicer_access import audited, caller
from paceline_scheduler.api.validation import MAX_KEY_BYTES
from paceline_scheduler.backend import Backend, Executors, PlanRecording
from paceline_scheduler.core.answers import RequestState
from paceline_scheduler.core.events import DrainExecutor, SetLimits, UndrainExecutor
from paceline_scheduler.core.queue.listing import MAX_LISTED, Selection
from paceline_scheduler.errors import InvalidRequestError, NoRecordDirError, UnknownExecutorError, UnsupportedError
from paceline_scheduler.observers.steps import StepRecord, StepWatch

_MAX_WAITING_STEPS = 256
_NUM_LISTED = 50
_MAX_PLACE_DIGITS = 19
_MAX_ADDRESS_BYTES = 128
_MAX_TENANTS = 10_000
_MAX_LIMITS = {"max_num_queued_reqs": 1_000_000, "max_num_queued_tokens": 1 << 40, "max_num_batched_tokens": 1 << 20}

_Context = grpc.aio.ServicerContext[Any, Any]
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Observed:
    """What is looked at beside the core. `recording` is None without a folder for it."""

    steps: StepWatch
    meter: Meter
    num_lost_log_lines: Callable[[], int]
    recording: PlanRecording | None = None


class AdminServicer(AdminServiceServicer):
    def __init__(self, backend: Backend, executors: Executors, scheduler_id: str, observed: Observed) -> None:
        self._backend = backend
        self._executors = executors
        self._scheduler_id = scheduler_id
        self._observed = observed

    @override
    async def ListExecutors(self, request: pb.ListExecutorsRequest, context: _Context) -> pb.ListExecutorsResponse:
        num_requests, num_tokens = self._backend.views.num_waiting()
        return pb.ListExecutorsResponse(
            executors=[wire.executor_view(executor) for executor in self._executors.statuses()],
            scheduler_id=self._scheduler_id,
            num_waiting_requests=num_requests,
            num_waiting_tokens=num_tokens,
            num_lost_log_lines=self._observed.num_lost_log_lines(),
            num_refusals=self._observed.meter.counts("admission_rejections_total"),
            num_recoveries=self._observed.meter.counts("recoveries_total"),
        )

    @override
    async def ListRequests(self, request: pb.ListRequestsRequest, context: _Context) -> pb.ListRequestsResponse:
        selection = Selection(
            tenant=request.tenant if request.HasField("tenant") else None,
            states=frozenset(map(_request_state, request.states)),
            after=_arrival_number(request.page_token),
            at_most=min(request.page_size or _NUM_LISTED, MAX_LISTED),
        )
        listed = self._backend.views.listed(selection, self._backend.now_s())
        return pb.ListRequestsResponse(
            requests=map(wire.request_view, listed.requests),
            next_page_token="" if listed.next_after is None else str(listed.next_after),
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
        sent = {field.name: value for field, value in limits.ListFields()}
        numbers = {name: _checked(name, sent[name]) for name in _MAX_LIMITS if name in sent}
        tenants = _tenants(limits, current.tenants)
        self._backend.feed(SetLimits(replace(current, **numbers, tenants=tenants)))
        told: dict[str, str | int] = {**numbers}
        if limits.tenants:
            told["tenants"] = status.cut(" ".join(of.tenant for of in limits.tenants))
        if limits.HasField("any_tenant"):
            told["any_tenant"] = True
        _log.info("limits_set", **told, **audited(caller()))
        return pb.SetLimitsResponse(limits=wire.limits(self._backend.views.limits()))

    @override
    async def WatchSteps(
        self, request: pb.WatchStepsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchStepsResponse]:
        if request.address:
            self._check_address(request.address)
        watch = _StepWatch(request.address)
        self._observed.steps.add(watch)
        try:
            while True:
                record, num_dropped = await watch.next()
                yield wire.step_response(record, num_dropped)
        finally:
            self._observed.steps.remove(watch)

    @override
    async def SetPlanRecording(
        self, request: pb.SetPlanRecordingRequest, context: _Context
    ) -> pb.SetPlanRecordingResponse:
        recording = self._observed.recording
        if recording is None:
            raise NoRecordDirError("this scheduler has no folder for recordings; start it with --record-dir")
        if request.HasField("name"):
            recording.start(request.name, is_raw=request.raw)
        else:
            recording.stop()
        _log.info("recording_set", name=request.name or None, is_raw=request.raw, **audited(caller()))
        return pb.SetPlanRecordingResponse()

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


def _arrival_number(token: str) -> int:
    if not token:
        return 0
    if not token.isascii() or not token.isdigit() or len(token) > _MAX_PLACE_DIGITS:
        raise InvalidRequestError("page_token", "is none that was given out; leave it unset for the first page")
    return int(token)


def _request_state(number: int) -> RequestState:
    try:
        return RequestState(number)
    except ValueError:
        raise InvalidRequestError("states", f"has {number}, which is no state that a request can have") from None


def _checked(name: str, value: int) -> int:
    highest = _MAX_LIMITS.get(name, MAX_LIMIT)
    if not 1 <= value <= highest:
        raise InvalidRequestError(f"limits.{name}", f"is {value}, must be at least 1 and at most {highest}")
    return value


def _tenants(limits: pb.Limits, current: TenantBounds) -> TenantBounds:
    named: dict[str, TenantLimits] = {}
    for index, sent in enumerate(limits.tenants):
        path = f"tenants[{index}]"
        if not 1 <= len(sent.tenant.encode()) <= MAX_KEY_BYTES or sent.tenant in named:
            sentence = f"must have 1 to {MAX_KEY_BYTES} bytes, and no tenant stands twice"
            raise InvalidRequestError(f"limits.{path}.tenant", sentence)
        named[sent.tenant] = _tenant_limits(sent, path)
    own = {tenant: of for tenant, of in {**current.own, **named}.items() if of != NO_LIMITS}
    if len(own) > _MAX_TENANTS:
        raise InvalidRequestError("limits.tenants", f"are {len(own)}, at most {_MAX_TENANTS} have bounds of their own")
    has_any = limits.HasField("any_tenant")
    return TenantBounds(own, _tenant_limits(limits.any_tenant, "any_tenant") if has_any else current.any_tenant)


def _tenant_limits(sent: pb.TenantLimits, path: str) -> TenantLimits:
    if sent.HasField("weight"):
        raise UnsupportedError(f"limits.{path}.weight")
    values = {field.name: value for field, value in sent.ListFields() if field.name != "tenant"}
    share = values.pop("max_kv_share", None)
    if share is not None and not 0 < share <= 1:
        raise InvalidRequestError(f"limits.{path}.max_kv_share", f"is {share:.7g}, must be above 0 and at most 1")
    return TenantLimits(
        **{name: _checked(f"{path}.{name}", value) for name, value in values.items()}, max_kv_share=share
    )
