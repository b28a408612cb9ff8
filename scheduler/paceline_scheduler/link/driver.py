"""The one place that owns the core and the clock: every event goes through it into the core, and what the core answers
goes out from it, tokens to the edge at once and plans to the executors right after.

Decides nothing itself. Runs on the event loop; the core knows nothing of that.
"""

import asyncio
from collections.abc import Callable, Sequence

from paceline_scheduler.backend import (
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
from paceline_scheduler.core.plan import StepResult
from paceline_scheduler.core.request import FinishReason, Request, RequestKey, Resumption
from paceline_scheduler.core.views import Estimate, Explanation
from paceline_scheduler.errors import DivergenceError, DrainingError, GivenUpError, RequestRefusedError
from paceline_scheduler.link.attachment import Attachment, served_models, status
from paceline_scheduler.link.executor_link import PlanPort
from paceline_scheduler.link.limit_values import changed, limit_values
from paceline_scheduler.link.messages import ExecutorState, ModelCard
from paceline_scheduler.link.step_watch import StepWatch, count_step, planned_step
from paceline_scheduler.link.sync_gate import SyncGate

_DRAINING_RETRY_S = 1.0
_GIVEN_UP_RETRY_S = 0.5
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
        self._handles: dict[int, None] = {}  # of requests the edge still waits for
        self._gate = SyncGate()
        self._is_draining = False
        self._is_pump_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._watch = StepWatch()
        self._readiness: Callable[[bool], None] | None = None
        self._was_ready = False
        self._idle = asyncio.Event()

    def connect(self, sink: OutputSink, readiness: Callable[[bool], None] | None = None) -> None:
        """Join the edge; `readiness` is told whenever new requests can, or can no longer, be run."""
        self._sink = sink
        self._readiness = readiness

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be run: an executor serves and takes new ones."""
        return not self._is_draining and any(e.is_serving and not e.is_draining for e in self._executors.values())

    def begin_drain(self) -> None:
        """Take nothing new from now on."""
        self._is_draining = True
        self._tell_readiness()

    async def wait_until_idle(self) -> None:
        """Wait until no request is left that the edge waits for."""
        while self._handles:
            self._idle.clear()
            await self._idle.wait()

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
        if self._is_draining:
            raise DrainingError("this scheduler is shutting down; send the request again", _DRAINING_RETRY_S)
        now = self._clock()
        try:
            for request in requests:
                self._core.submit(request, now)
        except RequestRefusedError:
            for request in requests:  # those that were not taken are unknown, and passed over
                self._core.end(request.handle, 0, FinishReason.ERROR, now)
            raise
        self._taken(requests)

    async def until_synced(self) -> None:
        """Return when it is known what every executor runs; raises NoExecutorError when that does not come soon."""
        await self._gate.passed()

    def resume(self, *resumptions: Resumption) -> tuple[Resumed, ...]:
        """Attach listeners to all completions of a request, or none; what is not known is queued.

        Raises a RequestRefusedError.
        """
        if self._is_draining:
            raise DrainingError("this scheduler is shutting down; send the request again", _DRAINING_RETRY_S)
        resumed = self._core.resume(resumptions, self._clock())
        self._taken([resumption.request for resumption in resumptions])
        for found in resumed:
            for handle in () if found.outputs is None else found.outputs.finishes:
                self._forget_handle(handle)
        return resumed

    def detach(self, handle: int) -> None:
        """Nobody listens to a request for now: it goes on for a while if it is resumable."""
        self._core.detach(handle, self._clock())
        self._forget_handle(handle)
        self._set_timer()
        self._pump_soon()

    def _taken(self, requests: Sequence[Request]) -> None:
        self._handles.update(dict.fromkeys(request.handle for request in requests))
        self._pump_soon()
        if any(request.deadline_s is not None for request in requests):
            self._set_timer()

    def end(self, handle: int, num_output_tokens: int, reason: FinishReason) -> int:
        """End a request from the edge's side; returns how many prompt tokens came from the prefix cache."""
        num_cached_tokens = self._core.end(handle, num_output_tokens, reason, self._clock())
        self._forget_handle(handle)
        self._pump_soon()
        return num_cached_tokens

    def cancel(self, key: RequestKey) -> None:
        """End a request as CANCELLED and tell its stream; raises UnknownRequestError."""
        self._deliver(self._core.cancel(key, self._clock()))
        self._pump_soon()

    def explain(self, key: RequestKey) -> Explanation:
        """Return where a request stands; raises UnknownRequestError."""
        return self._core.explain(key)

    def estimate(self, request: Request) -> Estimate:
        """Return what would become of a request if it were submitted now."""
        return self._core.estimate(request, self._clock())

    def acknowledge(self, keys: tuple[RequestKey, ...]) -> None:
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
        return tuple(
            status(address, executor, None if executor.description is None else self._core.counts(address))
            for address, executor in sorted(self._executors.items())
        )

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

    def held(self, address: str) -> None:
        """Another scheduler that is alive drives the executor."""
        self._gate.is_held(address)

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
        model: ModelCard,
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
        executor.port, executor.last_error, executor.is_serving = port, "", True
        executor.planned.clear()
        outputs = self._core.attach(description, snapshot, self._clock())
        self._set_state(address, ExecutorState.READY)
        if executor.is_draining:
            self.draining(address)
        self._gate.has_word(address)
        self._deliver(outputs)
        self._set_timer()
        self._pump_all()

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
        planned = executor.planned.popleft()
        count_step(executor.steps, planned, result)
        if self._watch.is_watched:
            waiting, _ = self._core.num_waiting()
            self._watch.tell(address, planned, result, waiting, self._core.counts(address).blocks)

    def draining(self, address: str) -> None:
        """Place nothing new on an executor."""
        executor = self._executors[address]
        executor.is_draining = True
        if executor.description is not None:
            self._core.drain(address)
        if executor.state is ExecutorState.READY:
            executor.state = ExecutorState.DRAINING
        self._tell_readiness()

    def detached(self, address: str, reason: str) -> None:
        """Plan nothing for an executor until it attaches again."""
        executor = self._executors[address]
        executor.port, executor.last_error = None, reason
        self._gate.is_not_held(address)
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

    def displaced(self, reason: str) -> None:
        """Another scheduler runs these requests now, and their clients find them there."""
        self.give_up(f"another scheduler took over ({reason}); send the request again")

    def give_up(self, reason: str) -> None:
        """Begin anew: tell every stream that its request is not run here any more, and drive nothing until a welcome.

        What executors hold of the requests stays there.
        """
        limits = self._core.limits
        self._core = self._make_core()
        self._core.limits = limits
        self.looked(tuple(self._executors))
        for address, executor in self._executors.items():
            executor.port = executor.description = executor.model = None
            executor.last_error, executor.is_serving = reason, False
            self._set_state(address, ExecutorState.LOST)
        error = GivenUpError(reason, _GIVEN_UP_RETRY_S)
        self._deliver(Outputs(failures=tuple(Failure(handle, error) for handle in sorted(self._handles))))

    # Inside

    def _deliver(self, outputs: Outputs) -> None:
        if not outputs:
            return
        for tokens in outputs.tokens:
            for handle in tokens.finishes:
                self._forget_handle(handle)
        for failure in outputs.failures:
            self._forget_handle(failure.handle)
        assert self._sink is not None, "the edge is joined before anything runs"
        self._sink.deliver(outputs)

    def _forget_handle(self, handle: int) -> None:
        self._handles.pop(handle, None)
        if not self._handles:
            self._idle.set()

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

    def _set_timer(self) -> None:
        """Come back when something is due: a deadline, the end of a wait for a client."""
        at_s = self._core.next_deadline()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_s is not None:
            self._timer = self._loop.call_later(max(0.0, at_s - self._clock()), self._expire, at_s)

    def _expire(self, at_s: float) -> None:
        self._timer = None
        self._deliver(self._core.expire(max(at_s, self._clock())))  # timers may fire a moment early
        self._set_timer()
        self._pump_soon()

    def _set_state(self, address: str, state: ExecutorState) -> None:
        self._executors[address].state = state
        self._tell_readiness()

    def _tell_readiness(self) -> None:
        is_ready = self.is_ready
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            if self._readiness is not None:
                self._readiness(is_ready)
