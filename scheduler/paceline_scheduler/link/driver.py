"""The one place that owns the core and the clock: events go into the core through it and answers out of it, tokens to
the edge at once and plans to the executors right after. Decides nothing; knows the event loop, which the core does not.
"""

import asyncio
from collections.abc import Callable, Sequence

from paceline.plan.values import FinishReason, Model, RecordId, StepResult
from paceline_scheduler.backend import (
    Arrival,
    ExecutorStatus,
    LimitValues,
    OutputSink,
    ServedModel,
    StepSink,
    TokenizerSource,
)
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.core.outputs import Failure, Outputs, Resumed
from paceline_scheduler.core.request import Request, Resumption
from paceline_scheduler.core.views import Estimate, Explanation
from paceline_scheduler.errors import DivergenceError, DrainingError, GivenUpError, RequestRefusedError
from paceline_scheduler.holder import Holder
from paceline_scheduler.link.attachment import Attachment, served_models, statuses
from paceline_scheduler.link.executor_link import PlanPort
from paceline_scheduler.link.limit_values import changed, limit_values
from paceline_scheduler.link.messages import ExecutorState
from paceline_scheduler.link.readiness import Readiness, Standing, readiness_of
from paceline_scheduler.link.step_watch import StepWatch, planned_step
from paceline_scheduler.link.sync_gate import SyncGate
from paceline_scheduler.link.taken_requests import TakenRequests
from paceline_scheduler.link.tasks import Alarm

_DRAINING_RETRY_S = 1.0
_GIVEN_UP_RETRY_S = 0.1
_SETTLE_POLL_S = 0.01


class Driver:
    """The edge's Backend and the links' listener. `clock` gives monotonic seconds."""

    def __init__(
        self, make_core: Callable[[], Core], clock: Callable[[], float], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._make_core = make_core
        self._core = make_core()
        self._clock = clock
        self._loop = loop
        self._sink: OutputSink | None = None
        self._executors: dict[str, Attachment] = {}
        self._requests = TakenRequests()
        self._gate = SyncGate(loop, self._tell_readiness)
        self._is_draining = False
        self._is_pump_due = False
        self._alarm = Alarm(loop, clock, self._expire)  # for deadlines, and the ends of waits for clients
        self._watch = StepWatch()
        self._on_readiness: Callable[[Readiness], None] = lambda _: None
        self._told = Readiness(Standing.UNREADY)

    def connect(self, sink: OutputSink, on_readiness: Callable[[Readiness], None] = lambda _: None) -> None:
        """Join the edge; `on_readiness` is told of every change of what would become of a new request."""
        self._sink, self._on_readiness = sink, on_readiness

    @property
    def readiness(self) -> Readiness:
        """What would become of a new request."""
        if self._is_draining:
            return Readiness(Standing.UNREADY)
        return readiness_of(self._executors.values(), self._gate.holder)

    def begin_drain(self) -> None:
        """Take nothing new from now on."""
        self._is_draining = True
        self._tell_readiness()

    async def wait_until_idle(self) -> None:
        """Wait until no request is left that the edge waits for."""
        await self._requests.until_none()

    @property
    def can_be_succeeded(self) -> bool:
        """Whether another scheduler could go on with every request that the edge waits for."""
        return self._requests.are_resumable

    @property
    def is_at_rest(self) -> bool:
        """Whether nobody is served here, and nobody can come back to what an executor runs."""
        return (self._gate.is_open or self._gate.holder is not None) and not self._core.num_unfinished()

    async def wait_until_settled(self) -> None:
        """Wait until executors have confirmed everything: no plan is in flight, no row waits for its release."""
        self._pump_all()
        while any(executor.port is not None and executor.planned for executor in self._executors.values()):  # noqa: ASYNC110
            await asyncio.sleep(_SETTLE_POLL_S)

    # Backend: what the edge asks

    def now_s(self) -> float:
        """Return the time of the injected clock in seconds."""
        return self._clock()

    def require_room(self, num_requests: int) -> None:
        """Raise QueueFullError when the queue would not take so many requests, however short."""
        self._core.require_room(num_requests)

    def require_time(self, model: str) -> None:
        """Raise QueueFullError when nothing of usual urgency would get its first token in time."""
        self._core.require_time(model, self._clock())

    def submit(self, *requests: Request) -> None:
        """Queue all completions of a request, or none; raises a RequestRefusedError."""
        self._require_open()
        now = self._clock()
        try:
            for request in requests:
                self._core.submit(request, now)
        except RequestRefusedError:
            for request in requests:  # those that were not taken are unknown, and passed over
                self._core.end(request.handle, 0, FinishReason.ERROR, now)
            raise
        self._taken(requests)

    async def until_synced(self, arrival: Arrival) -> None:
        """Return when it is known what every executor runs; raises NoExecutorError when that does not come soon."""
        await self._gate.passed(arrival)

    def require_lead(self) -> None:
        """Raise StandbyError while another scheduler is known to drive the executors."""
        self._gate.require_lead()

    def resume(self, *resumptions: Resumption) -> tuple[Resumed, ...]:
        """Attach listeners to all completions of a request, or none; what is not known is queued.

        Raises a RequestRefusedError.
        """
        self._require_open()
        resumed = self._core.resume(resumptions, self._clock())
        self._taken([resumption.request for resumption in resumptions])
        for found in resumed:
            for handle in () if found.outputs is None else found.outputs.finishes:
                self._requests.forget(handle)
        return resumed

    def known(self, key: RecordId, body_digest: bytes, model: str) -> Request | None:
        """Return a request to a model as it is known here, if its body has this digest."""
        return self._core.known(key, body_digest, model)

    def detach(self, handle: int) -> None:
        """Nobody listens to a request for now: it goes on for a while if it is resumable."""
        self._core.detach(handle, self._clock())
        self._requests.forget(handle)
        self._alarm.set(self._core.next_deadline())
        self._pump_soon()

    def _taken(self, requests: Sequence[Request]) -> None:
        self._requests.take(requests)
        self._pump_soon()
        if any(request.deadline_s is not None for request in requests):
            self._alarm.set(self._core.next_deadline())

    def end(self, handle: int, num_output_tokens: int, reason: FinishReason) -> int:
        """End a request from the edge's side; returns how many prompt tokens came from the prefix cache."""
        num_cached_tokens = self._core.end(handle, num_output_tokens, reason, self._clock())
        self._requests.forget(handle)
        self._pump_soon()
        return num_cached_tokens

    def cancel(self, key: RecordId) -> None:
        """End a request as CANCELLED and tell its stream; raises UnknownRequestError."""
        self._deliver(self._core.cancel(key, self._clock()))
        self._pump_soon()

    def explain(self, key: RecordId) -> Explanation:
        """Return where a request stands; raises UnknownRequestError."""
        return self._core.explain(key)

    def estimate(self, request: Request) -> Estimate:
        """Return what would become of a request if it were submitted now."""
        return self._core.estimate(request, self._clock())

    def acknowledge(self, keys: tuple[RecordId, ...]) -> None:
        """Let the executors forget records."""
        self._core.acknowledge(keys)
        self._pump_soon()

    def models(self) -> tuple[ServedModel, ...]:
        """Return the models of executors that are attached, or were a moment ago and are not lost."""
        return served_models(self._executors.values())

    def open_models(self) -> tuple[ServedModel, ...]:
        """Return the models of which new requests would be run."""
        return served_models(executor for executor in self._executors.values() if not executor.is_draining)

    def executors(self) -> tuple[ExecutorStatus, ...]:
        """Return all executors that are looked for."""
        return statuses(self._executors, self._core)

    def num_waiting(self) -> tuple[int, int]:
        """Return the length of the queue in requests and tokens."""
        return self._core.num_waiting()

    def drain_executor(self, address: str) -> int:
        """Place nothing new on an executor; KeyError if unknown, or not attached yet."""
        if self._executors[address].description is None:
            raise KeyError(address)
        self.draining(address)
        return self._core.counts(address).num_running_requests

    def limits(self) -> LimitValues:
        """Return the bounds in force."""
        return limit_values(self._core.limits, self._executors.values())

    def set_limits(self, limits: LimitValues) -> None:
        """Change the bounds."""
        self._core.limits = changed(self._core.limits, self.limits(), limits)
        self._pump_soon()

    def watch_steps(self, sink: StepSink) -> None:
        """Tell `sink` about every finished step."""
        self._watch.add(sink)

    def unwatch_steps(self, sink: StepSink) -> None:
        """Stop telling `sink`."""
        self._watch.remove(sink)

    # Listener: what the links say

    def looked(self, addresses: tuple[str, ...]) -> None:
        """These executors there are at the start: nothing is admitted before there is word of each."""
        self._gate.expect(addresses)
        for address in addresses:
            self._core.await_executor(address)

    def expected(self, address: str) -> None:
        """An executor is looked for."""
        self._executors[address] = Attachment()

    def held(self, address: str, holder: Holder) -> None:
        """Another scheduler that is alive drives the executor."""
        self._executors[address].holder = holder
        self._gate.is_held(address, holder)
        self._tell_readiness()

    def removed(self, address: str) -> None:
        """An executor is not looked for any more."""
        self.lost(address)
        del self._executors[address]
        self._deliver(self._core.forget_executor(address, self._clock()))

    def syncing(self, address: str) -> None:
        """The executor accepted this scheduler."""
        self._set_state(address, ExecutorState.SYNCING)

    def attached(
        self,
        model: Model,
        tokenizer: TokenizerSource,
        description: ExecutorDescription,
        snapshot: Snapshot,
        port: PlanPort,
    ) -> None:
        """Drive an executor from here on."""
        address = description.address
        executor = self._executors[address]
        if executor.description is None or executor.description.incarnation != description.incarnation:
            executor.is_draining = False  # that was another process
        executor.model, executor.tokenizer, executor.description = model, tokenizer, description
        executor.port, executor.last_error, executor.is_serving, executor.holder = port, "", True, None
        executor.planned.clear()
        outputs = self._core.attach(description, snapshot, self._clock())
        executor.state = ExecutorState.READY
        if executor.is_draining:
            self.draining(address)
        self._deliver(outputs)
        self._alarm.set(self._core.next_deadline())
        self._pump_all()
        self._gate.is_ours(address)  # late: plans leave before all who wait for the gate are served
        self._tell_readiness()

    def finished_step(self, address: str, result: StepResult) -> None:
        """Apply a result; raises DivergenceError."""
        executor = self._executors[address]
        if executor.port is None or not executor.planned:
            raise DivergenceError(f"a result of step {result.step_id} came from an executor that is not driven")
        outputs = self._core.complete(address, result, self._clock())
        self._deliver(outputs)
        self._deliver(self._core.refuse_hopeless(self._clock()))
        self._pump(address)  # what it plans follows this step, which still counts as planned
        self._pump_others(address)
        self._watch.finished(address, executor.steps, executor.planned.popleft(), result, self._core)

    def draining(self, address: str) -> None:
        """Place nothing new on an executor."""
        executor = self._executors[address]
        executor.is_draining = True
        if executor.description is not None:
            self._core.drain(address)
        if executor.state is ExecutorState.READY:
            executor.state = ExecutorState.DRAINING
        self._tell_readiness()

    def detached(self, address: str, reason: str, holder: Holder | None = None) -> None:
        """Plan nothing for an executor until it attaches again."""
        executor = self._executors[address]
        executor.port, executor.last_error, executor.holder = None, reason, holder
        self._gate.is_held(address, holder)
        self._core.detach_executor(address)
        if executor.state is not ExecutorState.LOST:
            self._set_state(address, ExecutorState.CONNECTING)

    def lost(self, address: str) -> None:
        """Run an executor's requests elsewhere."""
        executor = self._executors[address]
        executor.port, executor.is_serving = None, False
        self._gate.has_word(address)
        self._deliver(self._core.lose(address, self._clock()))
        self._set_state(address, ExecutorState.LOST)
        self._pump_all()

    def displaced(self, active: Holder) -> None:
        """Another scheduler runs these requests now, and their clients find them there."""
        self.give_up(f"another scheduler took over: {active}; send the request again", active)

    def give_up(self, reason: str, active: Holder | None = None) -> None:
        """Begin anew: tell every stream that its request is not run here any more, and drive nothing until a welcome.

        What executors hold of the requests stays there; `active` is who drives them now, if anybody does.
        """
        limits = self._core.limits
        self._core = self._make_core()
        self._core.limits = limits
        self.looked(tuple(self._executors))
        for executor in self._executors.values():
            executor.give_up(reason)
        self._tell_readiness()
        error = GivenUpError(reason, _GIVEN_UP_RETRY_S, active)
        self._deliver(Outputs(failures=tuple(Failure(handle, error) for handle in self._requests.handles)))

    # Inside

    def _require_open(self) -> None:
        if self._is_draining:
            raise DrainingError("this scheduler is shutting down; send the request again", _DRAINING_RETRY_S)

    def _deliver(self, outputs: Outputs) -> None:
        if not outputs:
            return
        for tokens in outputs.tokens:
            for handle in tokens.finishes:
                self._requests.forget(handle)
        for failure in outputs.failures:
            self._requests.forget(failure.handle)
        assert self._sink is not None, "the edge is joined before anything runs"
        self._sink.deliver(outputs)

    def _pump_soon(self) -> None:
        """Plan once this turn of the loop is over: what arrives together is planned together."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump_all)

    def _pump_all(self) -> None:
        self._is_pump_due = False
        self._deliver(self._core.refuse_hopeless(self._clock()))
        for address in self._executors:
            self._pump(address)

    def _pump_others(self, address: str) -> None:
        """Let the other executors take what this one left to them, and forget what ended here."""
        for other in self._executors:
            if other != address and self._core.has_news_for(other):
                self._pump(other)

    def _pump(self, address: str) -> None:
        """Send plans to an executor until it has enough of them."""
        executor = self._executors[address]
        while executor.port is not None:
            started_s = self._clock()
            plan = self._core.plan(address, started_s)
            if plan is None:
                return
            planning_ns = round((self._clock() - started_s) * 1e9)
            executor.planned.append(planned_step(plan, planning_ns, follows_work=bool(executor.planned)))
            executor.port.send_plan(plan)

    def _expire(self, at_s: float) -> None:
        self._deliver(self._core.expire(max(at_s, self._clock())))
        self._alarm.set(self._core.next_deadline())
        self._pump_soon()

    def _set_state(self, address: str, state: ExecutorState) -> None:
        self._executors[address].state = state
        self._tell_readiness()

    def _tell_readiness(self) -> None:
        readiness = self.readiness
        if readiness != self._told:
            self._told = readiness
            self._on_readiness(readiness)
