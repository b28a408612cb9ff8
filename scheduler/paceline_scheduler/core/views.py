"""What the edge, operators and tests can ask of the core. Changes nothing."""

from collections.abc import Iterable

from paceline.plan.values import RecordId
from paceline_scheduler.core.answers import Estimate, ExecutorCounts, Explanation, ListedRequests
from paceline_scheduler.core.executor.attachment import Attachment, StepInFlight
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.intake import check_taken
from paceline_scheduler.core.limits import LimitValues
from paceline_scheduler.core.live import LiveRequest, queue_key_of
from paceline_scheduler.core.phases import PhaseClock
from paceline_scheduler.core.queue.admission import check_wait, deadline_misses, full_tenants, queue_full, retry_after_s
from paceline_scheduler.core.queue.explain import Explainer, estimate
from paceline_scheduler.core.queue.listing import Selection, choose
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.core.tables.rows import ENDING, RUNNING
from paceline_scheduler.errors import NoExecutorError, RequestRefusedError, SchedulerError, UnknownRequestError

_AWAY_RETRY_S = 1.0


class CoreViews:
    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._retry = -1, 0.0  # for those that find the queue full, as of this planning

    def require_room(self, num_requests: int, tenant: str, now: float) -> None:
        """Raises QueueFullError unless the queue takes so many requests, however short. Costs little."""
        state = self._state
        state.tenants.check_rates(tenant, now)
        state.tenants.check_queue(tenant, state.waiting.of_tenant(tenant), (num_requests, 0))
        if not state.waiting.takes_requests(num_requests, tenant, state.limits.max_num_queued_reqs):
            if self._retry[0] != state.num_plannings:  # the same until something happens
                self._retry = state.num_plannings, retry_after_s(state.waiting, state.limits, state.executors)
            raise queue_full(state.waiting, state.limits, self._retry[1])

    def require_time(self, model: str, now: float, tenant: str = "") -> None:
        """Raises QueueFullError if no usual request would get its first token in time. Costs little."""
        serving = self._state.executors.serving(model)
        ahead = self._state.waiting.ahead_of_usual(model, tenant, now, full_tenants(serving))
        check_wait(ahead, self._state.limits, serving)

    def estimate(self, request: Request, now: float) -> Estimate:
        """A refusal is part of the answer. So is that no executor is there: when a request would begin nobody knows."""
        state = self._state
        live = LiveRequest(request, queue_key_of(request, state.num_arrivals + 1, now), PhaseClock.begin(now))
        serving = state.executors.serving(request.model)
        refusal: SchedulerError | None = None
        try:
            check_taken(state, live, now)
            for _, error in deadline_misses([live], serving, state.limits, now):
                refusal = error
            if not serving:
                refusal = NoExecutorError(f"no executor of the model {request.model!r} is there now", _AWAY_RETRY_S)
        except RequestRefusedError as refused:
            refusal = refused
        ahead = state.waiting.ahead_of(live, full_tenants(serving))
        return estimate(live, serving, ahead, state.limits, refusal)

    @property
    def is_draining(self) -> bool:
        return self._state.is_draining

    def limits(self) -> LimitValues:
        return self._state.limits_in_force

    def known(self, key: RecordId, body_digest: bytes, model: str) -> Request | None:
        """Returns one that runs, waits or ran, if its body has this digest."""
        live = self._state.requests.by_key(key) or self._state.requests.retained(key)
        return live.request if live is not None and live.request.is_of(body_digest, model) else None

    def open_request(self, key: RecordId) -> LiveRequest | None:
        live = self._state.requests.by_key(key)
        return live if live is not None and self._state.requests.is_open(live) else None

    def explain(self, key: RecordId, now: float) -> Explanation:
        """Raises UnknownRequestError."""
        state = self._state
        live = state.requests.by_key(key)
        if live is None:
            raise UnknownRequestError(
                f"this tenant has no request {key.request_id!r} that runs or waits; check the request_id"
            )
        return self._explainer(now).explain(live)

    def listed(self, selection: Selection, now: float) -> ListedRequests:
        return choose(self._state.requests.all(), selection, self._explainer(now), now)

    def _explainer(self, now: float) -> Explainer:
        return Explainer(self._state.executors.by_address, self._state.waiting, self._state.limits, now)

    def waiting_requests(self) -> tuple[LiveRequest, ...]:
        return self._state.waiting.all()

    def num_waiting(self) -> tuple[int, int]:
        """Returns requests and prompt tokens."""
        return self._state.waiting.num_requests, self._state.waiting.num_tokens

    def num_waiting_by_model(self) -> dict[str, int]:
        waiting = self._state.waiting
        return {model: len(waiting.of_model(model)) for model in waiting.models()}

    def num_unfinished(self) -> int:
        return len(self._state.requests)

    def with_listener(self) -> Iterable[LiveRequest]:
        return self._state.requests.with_listener()

    @property
    def is_synced(self) -> bool:
        """Only then is anything admitted."""
        return self._state.executors.is_synced

    def executor(self, address: str) -> Attachment:
        return self._state.executors.by_address[address]

    def description(self, address: str) -> ExecutorDescription | None:
        """Returns None before the first attachment, and after it was given up."""
        executor = self._state.executors.by_address.get(address)
        return None if executor is None else executor.description

    def drains(self, address: str) -> bool:
        return self._state.executors.drains(address)

    def has_plans_in_flight(self) -> bool:
        return any(executor.attached and executor.in_flight for executor in self._state.executors)

    def due_step(self, address: str) -> StepInFlight | None:
        """Returns None also while it is not attached."""
        executor = self._state.executors.by_address.get(address)
        if executor is None or not executor.attached or not executor.in_flight:
            return None
        return executor.in_flight[0]

    def is_idle(self, address: str) -> bool:
        """Nothing runs there, and nothing waits for an executor of its model."""
        executor = self._state.executors.by_address[address]
        return not (executor.ledger.rows.num_running or self._state.waiting.of_model(executor.description.model))

    def counts(self, address: str) -> ExecutorCounts:
        """Raises KeyError before the first attachment."""
        executor = self.executor(address)
        rows = executor.ledger.rows
        occupied = (rows.state == RUNNING) | (rows.state == ENDING)
        return ExecutorCounts(
            num_running_requests=rows.num_running,
            num_plans_in_flight=len(executor.in_flight),
            blocks=executor.ledger.pool.counts(),
            num_filled_slots=int(rows.num_computed[occupied].sum()),
            num_owned_slots=int(rows.num_slots[occupied].sum()),
            draft_speedup=executor.speculation.speedup,
            draft_saved_ns=int(executor.speculation.saved_ns),
        )

    def check(self) -> None:
        """Asserts that blocks are conserved and tables agree; for tests."""
        for executor in self._state.executors:
            executor.ledger.pool.check(executor.ledger.rows.tables)
        on_rows = [live.held for live in self._state.requests.all() if live.held is not None]
        assert len(set(on_rows)) == len(on_rows), "one request per row"
