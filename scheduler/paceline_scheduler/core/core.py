"""The scheduler's state machine: events and the time in, plans and outputs out.

The one place where all events arrive. It decides with the planner; what changes executors is in `ExecutorState`,
`apply_result` and `recovery`, what changes several things at once in `CoreState`.
"""

from collections.abc import Iterable

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import BatchPlan, FinalRelease, FinishReason, RecordId, StepResult
from paceline_scheduler.core import recovery
from paceline_scheduler.core.executor.results import apply_result
from paceline_scheduler.core.executor.state import ExecutorState
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import MAX_WAITED_S, LiveRequest, Status
from paceline_scheduler.core.logprobs import KeptLogprobs
from paceline_scheduler.core.outputs import NO_OUTPUTS, Failure, Outputs, Resumed
from paceline_scheduler.core.planning.planner import MAX_LOOKED_AT, decide
from paceline_scheduler.core.queue.admission import (
    check_fits,
    check_queue,
    check_wait,
    hopeless,
    no_longer_served,
    queue_full,
    retry_after_s,
)
from paceline_scheduler.core.queue.explain import estimate, explain
from paceline_scheduler.core.request import Progress, Request, Resumption
from paceline_scheduler.core.requests.resuming import Way, prior_of, way_back
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.core.tables.rows import ENDING, RUNNING
from paceline_scheduler.core.telling import told
from paceline_scheduler.core.views import Estimate, ExecutorCounts, Explanation
from paceline_scheduler.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    NoExecutorError,
    RequestFailedError,
    RequestRefusedError,
    SchedulerError,
    UnknownRequestError,
)

_PROBE_EVERY = 16
"""Of so many requests called hopeless one is run, unless steps are run anyway: a forecast that nothing tests stays."""

_OWED_S = 60.0
"""For so long a scheduler that is new takes requests that say that they were taken by another one as owed."""

_OWED_RETRY_S = 0.5

_NOTHING_HELD = Progress(0, HASH_START)


class Core:
    """All requests and executors of one scheduler. `now` is seconds on the injected monotonic clock."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self._state = CoreState()
        self._retry_s: float | None = None
        self._num_untested = 0  # requests called hopeless since a step last showed how long steps take
        self._first_attached_s: float | None = None

    # Requests

    def require_room(self, num_requests: int) -> None:
        """Raise QueueFullError when the queue would not take so many requests, however short."""
        waiting = self._state.waiting
        if waiting.num_requests + num_requests > self.limits.max_num_queued_reqs:
            if self._retry_s is None:  # the same for all that are refused until something happens
                self._retry_s = retry_after_s(waiting, self.limits, self._state.executors)
            raise queue_full(waiting, self.limits, self._retry_s)

    def require_time(self, model: str, now: float) -> None:
        """Raise QueueFullError when no request of usual urgency would get its first token in time, however short."""
        ahead = self._state.waiting.ahead_of_usual(model, now)
        check_wait(ahead, self.limits, self._state.executors.serving(model))

    def submit(self, request: Request, now: float) -> None:
        """Queue a request; raises a RequestRefusedError, changing nothing, if it is not taken."""
        before = self._state.register.by_key(request.key)
        is_open = before is not None and self._state.register.is_open(before)
        if before is not None and is_open and before.detached_until_s is None:
            raise DuplicateRequestError(f"request_id {request.key.request_id!r} is in use; choose another one")
        self._begin(Resumption(request, _NOTHING_HELD), now)

    def resume(self, resumptions: Iterable[Resumption], now: float) -> tuple[Resumed, ...]:
        """Let clients hear of requests from where they are; what is not known is queued.

        Raises StaleAttachmentError, ResumeMismatchError or what `submit` raises, and then nothing has changed.
        """
        found = [(resumption, *self._way_back(resumption)) for resumption in resumptions]
        begun: dict[RecordId, Resumed] = {}
        try:
            for resumption, _, way in found:
                if way is Way.BEGIN:
                    begun[resumption.request.key] = self._begin(resumption, now)
        except RequestRefusedError:
            for key in begun:
                self._undo(key, now)
            raise
        return tuple(begun.get(each.request.key) or self._go_on(each, live, way, now) for each, live, way in found)

    def detach(self, handle: int, now: float) -> None:
        """Nobody listens to a request any more: a resumable one waits for its client, any other one ends."""
        live = self._state.register.by_handle(handle)
        if live is None:
            return
        if live.request.is_resumable:
            self._state.register.detach(live, now)
        else:
            self._state.end(live, FinalRelease(self._state.num_output(live), FinishReason.CANCELLED), now)

    def end(self, handle: int, num_output_tokens: int, reason: FinishReason, now: float) -> int:
        """End a request from the edge's side; unknown handles are ignored, nothing more is delivered for it.

        Returns how many tokens of its prompt came from the prefix cache.
        """
        live = self._state.register.by_handle(handle)
        if live is None:
            return 0
        self._state.end(live, FinalRelease(num_output_tokens, reason), now)
        return live.num_prompt_cached_tokens or 0

    def cancel(self, key: RecordId, now: float) -> Outputs:
        """End a request as CANCELLED and tell its stream."""
        live = self._state.register.by_key(key)
        if live is None or not self._state.register.is_open(live):
            raise UnknownRequestError(f"no running request {key.request_id!r} of this tenant")
        output = self._state.output_of(live)
        output_hash = rolling_hash(HASH_START, output)
        self._state.end(live, FinalRelease(len(output), FinishReason.CANCELLED), now)
        return Outputs(tokens=(told(live, len(output), output[:0], output_hash, FinishReason.CANCELLED),))

    def expire(self, now: float) -> Outputs:
        """Fail the requests whose deadline has passed, and end those to which no client came back."""
        register = self._state.register
        register.drop_old(now)
        for live in register.pop_abandoned(now):
            self._state.give_up(live, now)
        late = [(live, DeadlineExceededError(_deadline_sentence(live))) for live in register.pop_late(now)]
        return self._fail(late, now)

    def refuse_hopeless(self, now: float) -> Outputs:
        """Fail what waits, is next in line and could not end in time even if it were alone: it would cost a prefill."""
        if not self._state.register.has_deadlines:
            return NO_OUTPUTS
        waiting, late = self._state.waiting, []
        for model in waiting.models():
            serving = self._state.executors.serving(model)
            late += hopeless(waiting.line(model)[:MAX_LOOKED_AT], serving, self.limits, now)
        first = self._num_untested
        self._num_untested += len(late)
        return self._fail((each for number, each in enumerate(late, first + 1) if number % _PROBE_EVERY), now)

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do next."""
        return self._state.register.next_s()

    def acknowledge(self, keys: Iterable[RecordId]) -> None:
        """Let the executors forget the records of requests whose clients have all of them; others are passed over."""
        register = self._state.register
        for key in keys:
            register.drop_kept(key)
            live = register.by_key(key)
            if live is None:
                self._state.executors.forget_records(key)
            elif not register.is_open(live):
                live.is_acknowledged = True  # its record is made when it leaves its row

    # Executors

    @property
    def is_synced(self) -> bool:
        """Whether every executor that is awaited was attached, or is lost: only then is anything admitted."""
        return self._state.executors.is_synced

    def await_executor(self, address: str) -> None:
        """Admit nothing before this executor was attached or lost."""
        self._state.executors.await_word(address)

    def attach(self, description: ExecutorDescription, snapshot: Snapshot, now: float) -> Outputs:
        """Take over an executor as its snapshot shows it; requests it lost wait again."""
        if self._first_attached_s is None:
            self._first_attached_s = now
        outputs = recovery.attach(self._state, description, snapshot, now)
        return Outputs(outputs.tokens, (*outputs.failures, *self._fail_unservable(now)))

    def detach_executor(self, address: str) -> None:
        """The stream to an executor ended: plan nothing for it until it attaches again or is lost."""
        executor = self._state.executors.by_address.get(address)
        if executor is not None:
            executor.attached = False

    def lose(self, address: str, now: float) -> Outputs:
        """An executor is gone: its requests wait for another placement, but for one that it must have died of."""
        failures = recovery.lose(self._state, address, now)
        return Outputs(failures=failures) if failures else NO_OUTPUTS

    def forget_executor(self, address: str, now: float) -> Outputs:
        """An executor that was lost is no longer expected back: fail what only it could hold."""
        self._state.executors.has_word(address)
        self._state.executors.by_address.pop(address, None)
        return Outputs(failures=self._fail_unservable(now))

    def drain(self, address: str) -> int:
        """Place nothing new on an executor, and move what runs there to others as they have room.

        Returns how many requests run there now. KeyError if unknown.
        """
        executor = self.executor(address)
        executor.draining = True
        return executor.rows.num_running

    # Steps

    def plan(self, address: str, now: float) -> BatchPlan | None:
        """Return the next step of an executor, or None when there is nothing to do or enough is in flight."""
        executor = self._state.executors.by_address.get(address)
        if executor is None or not executor.attached:
            return None
        if not executor.takes_plan(self.limits):
            return None
        self._retry_s = None
        tags, releases = executor.settle()
        line = self._state.waiting.line(executor.description.model)
        waiting = self._state.executors.waiting_for(executor, line, self.limits, now)
        decision = decide(executor.view(), waiting, self.limits)
        if decision.is_empty and not (tags or releases or executor.pending_forgets):
            return None
        for admission in decision.admissions:
            self._state.waiting.remove(admission.live)
        return executor.commit(decision, tags, releases, now)

    def has_news_for(self, address: str) -> bool:
        """Tell whether an executor might get a plan because of what happened elsewhere."""
        executor = self._state.executors.by_address.get(address)
        if executor is None:
            return False
        has_ending = bool(executor.ending_rows or executor.pending_forgets)
        return has_ending or bool(self._state.waiting.line(executor.description.model))

    def complete(self, address: str, result: StepResult, now: float) -> Outputs:
        """Apply a result; raises DivergenceError, changing nothing, when it does not fit what was planned."""
        applied = apply_result(self.executor(address), result)
        self._num_untested = 0
        for live in applied.ended:
            self._state.register.close(live)
        for live in applied.left:
            if not live.is_stranger:
                self._state.wait_again(live, now)
        tokens = () if applied.tokens is None else (applied.tokens,)
        return Outputs(tokens, applied.failures) if tokens or applied.failures else NO_OUTPUTS

    # Views

    def executor(self, address: str) -> ExecutorState:
        """Return an executor's state, to look at. KeyError if unknown."""
        return self._state.executors.by_address[address]

    def known(self, key: RecordId, body_digest: bytes, model: str) -> Request | None:
        """Return a request to a model as it is known here, if its body has this digest."""
        live = self._state.register.by_key(key) or self._state.register.kept(key)
        return live.request if live is not None and live.request.is_of(body_digest, model) else None

    def explain(self, key: RecordId) -> Explanation:
        """Return where a request stands; raises UnknownRequestError."""
        live = self._state.register.by_key(key)
        if live is None:
            raise UnknownRequestError(f"no request {key.request_id!r} of this tenant is running or waiting")
        position = self._state.waiting.position(live) if live.status is Status.WAITING else 0
        line = self._state.waiting.line(live.request.model)
        return explain(live, self._state.executors.by_address, line, position, self.limits)

    def estimate(self, request: Request, now: float) -> Estimate:
        """Return what would become of a request if it were submitted now."""
        live = LiveRequest(request, self._state.num_arrivals + 1, submitted_s=now)
        serving = self._state.executors.serving(request.model)
        refusal: SchedulerError | None = None
        try:
            self._check(live)
            for _, error in hopeless([live], serving, self.limits, now):
                refusal = error
        except RequestRefusedError as refused:
            refusal = refused
        return estimate(live, serving, self._state.waiting.ahead_of(live), self.limits, refusal)

    def waiting_requests(self) -> tuple[LiveRequest, ...]:
        """Return what waits, by model and urgency; to look at."""
        return self._state.waiting.all()

    def num_waiting(self) -> tuple[int, int]:
        """Return the length of the queue in requests and in tokens."""
        return self._state.waiting.num_requests, self._state.waiting.num_tokens

    def num_unfinished(self) -> int:
        """Return how many requests have not ended, whether anybody listens to them or may come back."""
        return len(self._state.register)

    def counts(self, address: str) -> ExecutorCounts:
        """Return what operators see of an executor. KeyError if unknown."""
        executor = self.executor(address)
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
        for executor in self._state.executors:
            executor.pool.check(executor.rows.tables)
        running = {(live.address, live.row) for live in self._state.register.all() if live.row is not None}
        assert len(running) == sum(live.row is not None for live in self._state.register.all()), "one request per row"

    # Inside

    def _way_back(self, resumption: Resumption) -> tuple[LiveRequest | None, Way]:
        register, key = self._state.register, resumption.request.key
        live = register.by_key(key) or register.kept(key)
        output = prior_of(resumption.progress) if live is None else self._state.output_of(live)
        return live, way_back(live, output, resumption)

    def _go_on(self, resumption: Resumption, live: LiveRequest | None, way: Way, now: float) -> Resumed:
        assert live is not None, "what is not known is begun"
        if way is Way.JOIN:
            return recovery.join(self._state, live, resumption)
        return recovery.restart(self._state, live, resumption, now)

    def _begin(self, resumption: Resumption, now: float) -> Resumed:
        """Queue a request, behind what its client holds of it."""
        request, progress = resumption.request, resumption.progress
        ended = recovery.ended_by_prior(self._state, resumption)
        if ended is not None:
            return ended
        prior, register = prior_of(progress), self._state.register
        before = register.by_key(request.key) or register.kept(request.key)
        live = LiveRequest(
            request,
            self._state.num_arrivals + 1,
            submitted_s=now - min(request.waited_s, MAX_WAITED_S),
            attempt=max(progress.last_attempt, 0 if before is None else before.attempt),
            output_token_ids=prior,
            output_hash=progress.resume_hash if len(prior) else HASH_START,
            logprobs=KeptLogprobs(len(prior)) if request.num_logprobs is not None else None,
        )
        self._check(live, is_owed=self._owes(request, now))
        if before is not None and register.is_open(before):  # nobody listens to it, and its id is used again
            self._state.give_up(before, now)
        self._state.take_in(live)
        return Resumed(prior, None)

    def _undo(self, key: RecordId, now: float) -> None:
        live = self._state.register.by_key(key)
        if live is not None and self._state.register.is_open(live):
            self._state.give_up(live, now)

    def _owes(self, request: Request, now: float) -> bool:
        """Tell whether a request that says it was taken elsewhere may be right: this scheduler is new."""
        since_s = now if self._first_attached_s is None else self._first_attached_s
        return request.attachment > 1 and now - since_s < _OWED_S

    def _check(self, live: LiveRequest, *, is_owed: bool = False) -> None:
        """Raise a RequestRefusedError unless the request can be taken.

        One that another scheduler has taken waits for executors that can hold it, and behind nobody's forecast.
        """
        executors = self._state.executors
        try:
            check_fits(live.request, executors.by_address.values())
        except InvalidRequestError as error:
            if is_owed:
                raise NoExecutorError(f"the executors attached now cannot hold it ({error})", _OWED_RETRY_S) from error
            raise
        check_queue(live, self._state.waiting, self.limits, executors.serving(live.request.model), is_owed=is_owed)

    def _fail_unservable(self, now: float) -> tuple[Failure, ...]:
        """End what waits and can never run: without this it would wait, and hold up others, for ever."""
        if not self.is_synced:
            return ()
        found = ((live, no_longer_served(live, self._state.executors)) for live in self._state.waiting.all())
        return self._fail(((live, error) for live, error in found if error is not None), now).failures

    def _fail(self, failing: Iterable[tuple[LiveRequest, RequestFailedError]], now: float) -> Outputs:
        failures = []
        for live, error in failing:
            failures.append(Failure(live.request.handle, error))
            self._state.give_up(live, now)
        return Outputs(failures=tuple(failures)) if failures else NO_OUTPUTS


def _deadline_sentence(live: LiveRequest) -> str:
    return f"the timeout passed while the request was {live.status.value}; allow more time or send less"
