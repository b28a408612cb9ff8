"""The scheduler's state machine: events and the time in, plans and outputs out.

The one place that knows all requests and all executors. It decides with the planner, and changes executors only through
`ExecutorState`, `apply_result` and `rebuild`.
"""

from collections.abc import Callable, Iterable, Sequence

from paceline_scheduler.core.executor.reconcile import rebuild
from paceline_scheduler.core.executor.results import apply_result, cancelled, take_off
from paceline_scheduler.core.executor.state import ExecutorState
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest, Status
from paceline_scheduler.core.outputs import NO_OUTPUTS, Failure, Outputs
from paceline_scheduler.core.plan import BatchPlan, FinalRelease, StepResult
from paceline_scheduler.core.planning.dispatch import Dispatch
from paceline_scheduler.core.planning.planner import MAX_LOOKED_AT, Waiting, decide
from paceline_scheduler.core.planning.room import Room
from paceline_scheduler.core.queue.admission import (
    check_fits,
    check_queue,
    check_wait,
    hopeless,
    no_longer_served,
    queue_full,
    retry_after_s,
)
from paceline_scheduler.core.queue.deadlines import Deadlines
from paceline_scheduler.core.queue.explain import estimate, explain
from paceline_scheduler.core.queue.waiting import WaitingQueue
from paceline_scheduler.core.request import FinishReason, Request, RequestKey
from paceline_scheduler.core.tables.rows import ENDING, RUNNING
from paceline_scheduler.core.views import Estimate, ExecutorCounts, Explanation
from paceline_scheduler.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    RequestFailedError,
    RequestRefusedError,
    SchedulerError,
    UnknownRequestError,
)

_PROBE_EVERY = 16
"""Of so many requests called hopeless one is run, unless steps are run anyway: a forecast that nothing tests stays."""


class Core:
    """All requests and executors of one scheduler. `now` is seconds on the injected monotonic clock."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self._executors: dict[str, ExecutorState] = {}
        self._waiting = WaitingQueue()
        self._by_handle: dict[int, LiveRequest] = {}  # what the edge still hears of
        self._by_key: dict[RequestKey, LiveRequest] = {}  # until it has left its row as well
        self._deadlines = Deadlines(lambda live: live.request.handle in self._by_handle)
        self._num_arrivals = 0
        self._retry_s: float | None = None
        self._num_untested = 0  # requests called hopeless since a step last showed how long steps take

    # Requests

    def require_room(self, num_requests: int) -> None:
        """Raise QueueFullError when the queue would not take so many requests, however short."""
        if self._waiting.num_requests + num_requests > self.limits.max_num_queued_reqs:
            if self._retry_s is None:  # the same for all that are refused until something happens
                self._retry_s = retry_after_s(self._waiting, self.limits, self._executors.values())
            raise queue_full(self._waiting, self.limits, self._retry_s)

    def require_time(self, model: str, now: float) -> None:
        """Raise QueueFullError when no request of usual urgency would get its first token in time, however short."""
        check_wait(self._waiting.ahead_of_usual(model, now), self.limits, self._serving(model))

    def submit(self, request: Request, now: float) -> None:
        """Queue a request; raises a RequestRefusedError, changing nothing, if it is not taken."""
        before = self._by_key.get(request.key)
        if before is not None and before.request.handle in self._by_handle:
            raise DuplicateRequestError(f"request_id {request.key.request_id!r} is in use; choose another one")
        live = LiveRequest(request, self._num_arrivals + 1, submitted_s=now)
        self._check(live)
        if before is not None:
            self._make_way(before)
        self._num_arrivals += 1
        self._by_handle[request.handle] = self._by_key[request.key] = live
        self._deadlines.watch(live, len(self._by_handle))
        self._waiting.add(live)

    def end(self, handle: int, num_output_tokens: int, reason: FinishReason) -> int:
        """End a request from the edge's side; unknown handles are ignored, nothing more is delivered for it.

        Returns how many tokens of its prompt came from the prefix cache.
        """
        live = self._by_handle.get(handle)
        if live is None:
            return 0
        self._end(live, FinalRelease(num_output_tokens, reason))
        return live.num_prompt_cached_tokens or 0

    def cancel(self, key: RequestKey) -> Outputs:
        """End a request as CANCELLED and tell its stream."""
        live = self._by_key.get(key)
        if live is None or live.request.handle not in self._by_handle:
            raise UnknownRequestError(f"no running request {key.request_id!r} of this tenant")
        outputs = cancelled(live, self._executors.get(live.address or ""))
        self._end(live, FinalRelease(self._num_output(live), FinishReason.CANCELLED))
        return Outputs(tokens=(outputs,))

    def expire(self, now: float) -> Outputs:
        """Fail the requests whose deadline has passed."""
        return self._fail(
            (live, DeadlineExceededError(_deadline_sentence(live))) for live in self._deadlines.pop_passed(now)
        )

    def refuse_hopeless(self, now: float) -> Outputs:
        """Fail what waits, is next in line and could not end in time even if it were alone: it would cost a prefill."""
        if self._deadlines.is_empty:
            return NO_OUTPUTS
        late = []
        for model in self._waiting.models():
            late += hopeless(self._waiting.line(model)[:MAX_LOOKED_AT], self._serving(model), self.limits, now)
        first = self._num_untested
        self._num_untested += len(late)
        return self._fail(each for number, each in enumerate(late, first + 1) if number % _PROBE_EVERY)

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do next."""
        return self._deadlines.next_s()

    def acknowledge(self, keys: Iterable[RequestKey]) -> None:
        """Let the executors forget the records of requests whose clients have all of them; others are passed over."""
        for key in keys:
            live = self._by_key.get(key)
            if live is None:
                self._forget_records(key)
            elif live.request.handle not in self._by_handle:
                live.is_acknowledged = True  # its record is made when it leaves its row

    # Executors

    def attach(self, description: ExecutorDescription, snapshot: Snapshot) -> Outputs:
        """Take over an executor as its snapshot shows it; requests it lost wait again."""
        wanted = self._detach_all(description.address)
        executor, recovered = rebuild(description, snapshot, wanted)
        if description.address in self._executors:
            executor.carry_on(self._executors[description.address])
        executor.pending_forgets.extend(
            seen.key for seen in snapshot.rows if seen.is_open_record and seen.key not in self._by_key
        )
        self._executors[description.address] = executor
        for live in wanted.values():
            if live.row is None:
                self._wait_again(live)
        for live, outputs in recovered:
            if outputs.finishes:
                self._by_handle.pop(live.request.handle, None)
        return Outputs(tuple(outputs for _, outputs in recovered), self._fail_unservable())

    def detach(self, address: str) -> None:
        """The stream to an executor ended: plan nothing for it until it attaches again or is lost."""
        if address in self._executors:
            self._executors[address].attached = False

    def lose(self, address: str) -> None:
        """An executor is gone: its requests wait for another placement."""
        if address not in self._executors:
            return
        for live in self._detach_all(address).values():
            live.num_executor_deaths += 1
            self._wait_again(live)
        description = self._executors[address].description
        lost = ExecutorState(description)
        lost.attached = False
        lost.carry_on(self._executors[address])
        self._executors[address] = lost

    def forget_executor(self, address: str) -> Outputs:
        """An executor that was lost is no longer expected back: fail what only it could hold."""
        self._executors.pop(address, None)
        return Outputs(failures=self._fail_unservable())

    def drain(self, address: str) -> int:
        """Place nothing new on an executor, and move what runs there to others as they have room.

        Returns how many requests run there now. KeyError if unknown.
        """
        executor = self._executors[address]
        executor.draining = True
        return executor.rows.num_running

    # Steps

    def plan(self, address: str, now: float) -> BatchPlan | None:
        """Return the next step of an executor, or None when there is nothing to do or enough is in flight."""
        executor = self._executors.get(address)
        if executor is None or not executor.attached:
            return None
        max_in_flight = min(self.limits.max_plans_in_flight, executor.description.max_plans_in_flight)
        if len(executor.in_flight) >= max_in_flight:
            return None
        self._retry_s = None
        tags, releases = executor.settle()
        decision = decide(executor.view(), self._waiting_for(executor, now), self.limits)
        if decision.is_empty and not (tags or releases or executor.pending_forgets):
            return None
        for admission in decision.admissions:
            self._waiting.remove(admission.live)
        return executor.commit(decision, tags, releases, now)

    def has_news_for(self, address: str) -> bool:
        """Tell whether an executor might get a plan because of what happened elsewhere."""
        executor = self._executors.get(address)
        if executor is None:
            return False
        return bool(executor.pending_forgets or self._waiting.line(executor.description.model))

    def complete(self, address: str, result: StepResult) -> Outputs:
        """Apply a result; raises DivergenceError, changing nothing, when it does not fit what was planned."""
        applied = apply_result(self._executors[address], result)
        self._num_untested = 0
        for live in applied.ended:
            self._by_handle.pop(live.request.handle, None)
        for live in applied.left:
            if live.status is Status.FINISHED:
                self._forget(live)
            else:
                self._waiting.add(live)
        tokens = () if applied.tokens is None else (applied.tokens,)
        return Outputs(tokens, applied.failures) if tokens or applied.failures else NO_OUTPUTS

    # Views

    def executor(self, address: str) -> ExecutorState:
        """Return an executor's state, to look at. KeyError if unknown."""
        return self._executors[address]

    def explain(self, key: RequestKey) -> Explanation:
        """Return where a request stands; raises UnknownRequestError."""
        live = self._by_key.get(key)
        if live is None:
            raise UnknownRequestError(f"no request {key.request_id!r} of this tenant is running or waiting")
        position = self._waiting.position(live) if live.status is Status.WAITING else 0
        return explain(live, self._executors, self._waiting.line(live.request.model), position, self.limits)

    def estimate(self, request: Request, now: float) -> Estimate:
        """Return what would become of a request if it were submitted now."""
        live = LiveRequest(request, self._num_arrivals + 1, submitted_s=now)
        serving = self._serving(request.model)
        refusal: SchedulerError | None = None
        try:
            self._check(live)
            for _, error in hopeless([live], serving, self.limits, now):
                refusal = error
        except RequestRefusedError as refused:
            refusal = refused
        return estimate(live, serving, self._waiting.ahead_of(live), self.limits, refusal)

    def waiting_requests(self) -> tuple[LiveRequest, ...]:
        """Return what waits, by model and urgency; to look at."""
        return self._waiting.all()

    def num_waiting(self) -> tuple[int, int]:
        """Return the length of the queue in requests and in tokens."""
        return self._waiting.num_requests, self._waiting.num_tokens

    def num_unfinished(self) -> int:
        """Return how many requests the edge still hears of."""
        return len(self._by_handle)

    def counts(self, address: str) -> ExecutorCounts:
        """Return what operators see of an executor. KeyError if unknown."""
        executor = self._executors[address]
        occupied = (executor.rows.state == RUNNING) | (executor.rows.state == ENDING)
        return ExecutorCounts(
            num_running_requests=executor.rows.num_running,
            num_plans_in_flight=len(executor.in_flight),
            blocks=executor.pool.counts(),
            num_filled_slots=int(executor.rows.num_computed[occupied].sum()),
            num_owned_slots=int(executor.rows.num_slots[occupied].sum()),
        )

    def check(self) -> None:
        """Assert the conservation of blocks and the agreement of tables; for tests."""
        for executor in self._executors.values():
            executor.pool.check(executor.rows.tables)
        running = {(live.address, live.row) for live in self._by_key.values() if live.row is not None}
        assert len(running) == sum(live.row is not None for live in self._by_key.values()), "one request per row"

    # Inside

    def _waiting_for(self, executor: ExecutorState, now: float) -> Waiting:
        """Return what the executor may admit now, and whether it may give away what it runs."""
        line = self._waiting.line(executor.description.model)
        others = self._serving(executor.description.model) if len(self._executors) > 1 else []
        if executor.draining:
            # What was begun and no other could hold ends here, preempted or not.
            kept = [w for w in line if w.attempt and not any(w.fits(other.description) for other in others)]
            others_have_room = len(kept) == len(line) and others
            return Waiting(kept, _for_nobody_else, self._takes(others) if others_have_room else None)
        if not line or len(others) < 2:
            return Waiting(line, _for_nobody_else)
        views = {other.description.address: other.view() for other in others}
        return Waiting(line, Dispatch(executor.description.address, views, self.limits, now).is_for_others)

    def _takes(self, others: Sequence[ExecutorState]) -> Callable[[LiveRequest], bool]:
        """Return what tells of a request whether one of these has room for it, and counts it in there."""
        rooms = [Room(view, view.pool.num_available, self.limits) for view in (other.view() for other in others)]

        def takes(live: LiveRequest) -> bool:
            return any(room.take_if_fits(live) for room in rooms)

        return takes

    def _serving(self, model: str) -> list[ExecutorState]:
        """Return the executors that take requests for a model now."""
        executors = self._executors.values()
        return [e for e in executors if e.attached and not e.draining and e.description.model == model]

    def _check(self, live: LiveRequest) -> None:
        """Raise a RequestRefusedError unless the request can be taken."""
        check_fits(live.request, self._executors.values())
        serving = self._serving(live.request.model)
        check_queue(live, self._waiting, self.limits, serving)

    def _fail_unservable(self) -> tuple[Failure, ...]:
        """End what waits and can never run: without this it would wait, and hold up others, for ever."""
        found = ((live, no_longer_served(live, self._executors.values())) for live in self._waiting.all())
        return self._fail((live, error) for live, error in found if error is not None).failures

    def _fail(self, failing: Iterable[tuple[LiveRequest, RequestFailedError]]) -> Outputs:
        failures = []
        for live, error in failing:
            failures.append(Failure(live.request.handle, error))
            self._end(live, FinalRelease(self._num_output(live), FinishReason.ERROR))
        return Outputs(failures=tuple(failures)) if failures else NO_OUTPUTS

    def _num_output(self, live: LiveRequest) -> int:
        if live.row is None or live.address is None:
            return len(live.output_token_ids)
        return self._executors[live.address].rows.num_output(live.row)

    def _end(self, live: LiveRequest, final: FinalRelease) -> None:
        del self._by_handle[live.request.handle]
        if live.row is not None and live.address is not None:
            self._executors[live.address].end_row(live.row, final)
            return
        self._waiting.remove(live)
        live.status, live.final = Status.FINISHED, final
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        """It is over and on no row: only the record of its end is kept, where it ended, until that is acknowledged."""
        if self._by_key.get(live.request.key) is live:
            del self._by_key[live.request.key]
        kept_at = None if live.is_acknowledged else live.record_address
        # Attempts before the last left records without an end, which no executor drops by itself.
        if live.attempt > (0 if kept_at is None else 1):
            self._forget_records(live.request.key, kept_at)

    def _make_way(self, before: LiveRequest) -> None:
        """Its id is used again: nothing of it is left where the new request may be placed."""
        if before.address is not None:
            self._executors[before.address].leaving_keys.add(before.request.key)
        self._forget_records(before.request.key, before.address)

    def _forget_records(self, key: RequestKey, kept_at: str | None = None) -> None:
        for address, executor in self._executors.items():
            if address != kept_at:
                executor.pending_forgets.append(key)

    def _wait_again(self, live: LiveRequest) -> None:
        if live.status is Status.FINISHED:
            self._forget(live)
        else:
            self._waiting.add(live)

    def _detach_all(self, address: str) -> dict[RequestKey, LiveRequest]:
        """Take all requests off the rows of an executor, keeping what is known of their output."""
        executor = self._executors.get(address)
        if executor is None:
            return {}
        found = {}
        for row, live in enumerate(executor.rows.live):
            if live is None:
                continue
            take_off(executor, row, live)
            if not live.is_stranger:
                found[live.request.key] = live
        return found


def _deadline_sentence(live: LiveRequest) -> str:
    return f"the timeout passed while the request was {live.status.value}; allow more time or send less"


def _for_nobody_else(_: LiveRequest) -> bool:
    return False
