"""A Backend without core and executors: it remembers what the edge asked for, and delivers the tokens a test names."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import Claim, FinishReason, RecordId, TokenLogprobs
from paceline_scheduler.backend import Arrival, ExecutorStatus, OutputSink, ServedModel
from paceline_scheduler.core.answers import Estimate, Explanation, RequestState
from paceline_scheduler.core.events import (
    Acknowledge,
    Cancel,
    Detach,
    DrainExecutor,
    EndCompletion,
    Event,
    ReplyT,
    Resume,
    SetLimits,
    Submit,
    UndrainExecutor,
)
from paceline_scheduler.core.limits import CoreLimits, LimitValues
from paceline_scheduler.core.outputs import Failure, FinishNotice, Resumed, TokenOutputs
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.core.views import CoreViews
from paceline_scheduler.errors import (
    DuplicateRequestError,
    NoExecutorError,
    QueueFullError,
    RequestFailedError,
    RequestRefusedError,
    ResumeMismatchError,
    StaleAttachmentError,
    StandbyError,
    UnknownRequestError,
)
from paceline_scheduler.observers.steps import StepWatch
from virtual_time.clock import ManualClock


@dataclass(slots=True)
class _Output:
    """`request` is as it came last."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of all tokens, or of none
    notice: FinishNotice | None = None
    has_listener: bool = True

    @property
    def is_running(self) -> bool:
        return self.notice is None

    @property
    def rolling_hash(self) -> int:
        return rolling_hash(HASH_START, np.array(self.token_ids, dtype=np.int32))

    def end(self, reason: FinishReason, stop_token_id: int | None, num_cached_tokens: int) -> FinishNotice:
        num_prompt_tokens, num_tokens = len(self.request.prompt_token_ids), len(self.token_ids)
        self.notice = FinishNotice(reason, stop_token_id, num_prompt_tokens, num_cached_tokens, num_tokens)
        return self.notice


class _Outputs:
    def __init__(self) -> None:
        self.by_handle: dict[int, _Output] = {}  # by every handle that a request has had
        self.by_key: dict[RecordId, _Output] = {}  # the last request of each key

    def running(self, key: RecordId) -> _Output:
        output = self.by_key.get(key)
        if output is None or not output.is_running:
            raise UnknownRequestError(f"no running request {key.request_id!r} of this tenant")
        return output


@dataclass(slots=True)
class Asked:
    requests: dict[int, Request] = field(default_factory=dict)  # submitted or resumed, by handle
    resumed: list[Request] = field(default_factory=list)
    detached: list[int] = field(default_factory=list)
    ended: list[tuple[int, int, FinishReason]] = field(default_factory=list)  # handle, length, reason
    cancelled: list[RecordId] = field(default_factory=list)
    acknowledged: list[RecordId] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    undrained: list[str] = field(default_factory=list)


class _ScriptedViews(CoreViews):
    def __init__(self, backend: "ScriptedBackend") -> None:
        super().__init__(CoreState(CoreLimits()))
        self._backend = backend

    @override
    def require_room(self, num_requests: int, tenant: str, now: float) -> None:
        """The test may set `num_places`."""
        if self._backend.num_places is not None and num_requests > self._backend.num_places:
            raise QueueFullError("the queue is full", 2.0)

    @override
    def known(self, key: RecordId, body_digest: bytes, model: str) -> Request | None:
        known = self._backend.outputs.by_key.get(key)
        return known.request if known is not None and known.request.is_of(body_digest, model) else None

    @override
    def explain(self, key: RecordId, now: float) -> Explanation:
        """Every running request is at the head of a queue."""
        num_output = len(self._backend.outputs.running(key).token_ids)
        return Explanation(RequestState.WAITING, f"a row for {key.index}", 1, 2, "it was big", "", 3, num_output)

    @override
    def estimate(self, request: Request, now: float) -> Estimate:
        if self._backend.refusal is not None:
            return Estimate(0.0, 0.0, 0, 0, self._backend.refusal)
        return Estimate(0.5, 0.025, len(request.prompt_token_ids), 1, None)

    @override
    def num_waiting(self) -> tuple[int, int]:
        return 3, 70

    @override
    def limits(self) -> LimitValues:
        return self._backend.limit_values


class _ScriptedExecutors:
    """What the links tell."""

    def __init__(self, *models: ServedModel) -> None:
        self.served = models
        self.may_come = False
        self.synced = asyncio.Event()
        self.synced.set()
        self.active: Claim | None = None  # the scheduler behind which this one stands by
        self.known_executors: tuple[ExecutorStatus, ...] = ()
        self._changed = asyncio.Event()

    async def until_synced(self, arrival: Arrival) -> None:
        """Waits while the test has `synced` cleared."""
        del arrival
        await self.synced.wait()

    def require_lead(self) -> None:
        if self.active is not None:
            raise StandbyError(self.active, 0.15)

    def models(self) -> tuple[ServedModel, ...]:
        return self.served

    def known_models(self) -> tuple[ServedModel, ...]:
        return self.served

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def come(self, *models: ServedModel, may_come: bool = False) -> None:
        """Executors say what they serve; `may_come`: others have not yet."""
        self.served, self.may_come = models, may_come
        self._changed.set()

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        return self.known_executors


class ScriptedBackend(_ScriptedExecutors):
    """Requests run until the test ends them. Set `sink` before the first step; `refusal` is raised for the next one.

    It keeps the output of every request for those who come back, until `forget_everything`.
    """

    def __init__(self, *models: ServedModel) -> None:
        super().__init__(*models)
        self.clock = ManualClock()
        self.views = _ScriptedViews(self)
        self.sink: OutputSink | None = None
        self.refusal: RequestRefusedError | None = None
        self.num_places: int | None = None  # in the queue; None: as many as wanted
        self.asked = Asked()
        self.num_cached_tokens = 0  # what `end` answers
        self.watch = StepWatch()
        self.limit_values = LimitValues(1024, 4_194_304, 2048)
        self._submitted: asyncio.Queue[Request] = asyncio.Queue()
        self.outputs = _Outputs()

    async def next_request(self) -> Request:
        return await self._submitted.get()

    def step(
        self,
        tokens: Mapping[int, Sequence[int]],
        finished: Mapping[int, FinishReason] | None = None,
        logprobs: Mapping[int, tuple[TokenLogprobs, ...]] | None = None,
        prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] | None = None,
    ) -> None:
        """By any handle that the request has had. A STOP among `finished` was caused by the last token."""
        delivered = []
        for handle, token_ids in tokens.items():
            output = self.outputs.by_handle[handle]
            offset = len(output.token_ids)
            output.token_ids += token_ids
            output.logprobs += (logprobs or {}).get(handle, ())
            if finished and handle in finished:
                reason = finished[handle]
                output.end(reason, token_ids[-1] if reason is FinishReason.STOP else None, 2)
            if output.has_listener:
                delivered.append(_outputs_from(output, offset, (prompt_logprobs or {}).get(handle, ())))
        self._deliver(delivered, ())

    def lose(self, handle: int, *token_ids: int) -> None:
        self.outputs.by_handle[handle].token_ids += token_ids

    def fail(self, handle: int, error: RequestFailedError) -> None:
        output = self.outputs.by_handle[handle]
        output.end(FinishReason.ERROR, None, 0)
        del self.outputs.by_key[output.request.key]
        self._deliver((), (Failure(output.request.handle, error),))

    def forget_everything(self) -> None:
        self.outputs.by_key.clear()

    def now_s(self) -> float:
        return self.clock()

    def feed(self, event: Event[ReplyT]) -> ReplyT:
        reply: Any = None
        match event:
            case Submit(requests):
                self._submit(requests)
            case Resume(requests):
                reply = self._resume(requests)
            case Detach(handle):
                self._detach(handle)
            case EndCompletion(handle, num_output_tokens, reason):
                reply = self._end(handle, num_output_tokens, reason)
            case Cancel(key):
                self._cancel(key)
            case Acknowledge(keys):
                self.asked.acknowledged += keys
            case DrainExecutor(address):
                reply = self._drain(address)
            case UndrainExecutor(address):
                self.asked.undrained.append(address)
            case SetLimits(limits):
                self.limit_values = limits
            case _:
                raise AssertionError(f"no edge feeds {event}")
        return reply

    def _submit(self, requests: Sequence[Request]) -> None:
        self._refuse()
        for request in requests:
            self._take(request, [])

    def _resume(self, requests: Sequence[Request]) -> tuple[Resumed, ...]:
        """Goes on from the client's tokens where no equal request is known."""
        self._refuse()
        self.asked.resumed += requests
        known = [self._find(request) for request in requests]
        return tuple(self._attach(*pair) for pair in zip(requests, known, strict=True))

    def _detach(self, handle: int) -> None:
        output = self.outputs.by_handle[handle]
        if output.request.handle != handle:
            return
        self.asked.detached.append(handle)
        output.has_listener = False
        if not output.request.is_resumable:
            output.end(FinishReason.CANCELLED, None, 0)

    def _end(self, handle: int, num_output_tokens: int, reason: FinishReason) -> FinishNotice | None:
        """A former listener's call has no effect."""
        output = self.outputs.by_handle[handle]
        if output.request.handle != handle:
            return None
        self.asked.ended.append((handle, num_output_tokens, reason))
        del output.token_ids[num_output_tokens:]
        return output.end(reason, None, self.num_cached_tokens)

    def _cancel(self, key: RecordId) -> None:
        output = self.outputs.running(key)
        self.asked.cancelled.append(key)
        self.step({output.request.handle: []}, {output.request.handle: FinishReason.CANCELLED})

    def _drain(self, address: str) -> int:
        executor = {known.address: known for known in self.known_executors if known.incarnation}.get(address)
        if executor is None:
            raise NoExecutorError(f"executor {address!r} is known but not attached now; try again", 1.0)
        self.asked.drained.append(address)
        return executor.num_running_requests

    def _refuse(self) -> None:
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal

    def _take(self, request: Request, token_ids: list[int]) -> _Output:
        output = _Output(request, token_ids)
        self.asked.requests[request.handle] = request
        self.outputs.by_handle[request.handle] = self.outputs.by_key[request.key] = output
        self._submitted.put_nowait(request)
        return output

    def _find(self, request: Request) -> _Output | None:
        """Returns None when it is to be begun; raises what refuses it."""
        point = request.point
        known = self.outputs.by_key.get(request.key)
        if known is not None and not known.is_running and request.attachment == 1:
            known = None  # the name is used again
        if known is None:
            if point.resume_from and point.prior_output_token_ids is None:
                raise ResumeMismatchError("nothing is known of this request; send what you hold of it")
            return None
        if request.attachment <= known.request.attachment:
            if known.has_listener and request.attachment == known.request.attachment:
                raise DuplicateRequestError("another stream has this attachment")
            raise StaleAttachmentError("a newer attachment was here")
        held = known.token_ids[: point.resume_from]
        is_same = (
            len(held) == point.resume_from
            and rolling_hash(HASH_START, np.array(held, dtype=np.int32)) == point.resume_hash
        )
        if not is_same or known.request.body_digest != request.body_digest:
            raise ResumeMismatchError("this is not what the request has")
        return known

    def _attach(self, request: Request, output: _Output | None) -> Resumed:
        point = request.point
        if output is None:
            prior = point.prior_output_token_ids
            output = self._take(request, [] if prior is None else prior.tolist())
        output.request, output.has_listener = request, True
        self.asked.requests[request.handle], self.outputs.by_handle[request.handle] = request, output
        prefix = np.array(output.token_ids[: point.resume_from], dtype=np.int32)
        is_more = len(output.token_ids) > len(prefix) or not output.is_running
        return Resumed(prefix, _outputs_from(output, len(prefix), ()) if is_more else None)

    def _deliver(self, tokens: Sequence[TokenOutputs], failures: Sequence[Failure]) -> None:
        assert self.sink is not None, "the test joins edge and backend"
        self.sink.deliver(tokens, failures)


def _outputs_from(output: _Output, offset: int, prompt_logprobs: tuple[TokenLogprobs, ...]) -> TokenOutputs:
    """The output begins beyond `offset` tokens."""
    handle, token_ids = output.request.handle, output.token_ids[offset:]
    return TokenOutputs(
        handles=(handle,),
        offsets=np.array([offset], dtype=np.int32),
        num_tokens=np.array([len(token_ids)], dtype=np.int32),
        token_ids=np.array(token_ids, dtype=np.int32),
        attempts=np.ones(1, dtype=np.int32),
        rolling_hashes=np.array([output.rolling_hash], dtype=np.uint64),
        finishes={} if output.notice is None else {handle: output.notice},
        logprobs={handle: tuple(output.logprobs[offset:])} if output.logprobs else {},
        prompt_logprobs={handle: prompt_logprobs} if prompt_logprobs else {},
    )
