"""The requests that wait for an executor: one queue per model, the most urgent first.

A request's queue key never changes, so a preempted one, or one whose executor was lost, comes back to its position.
"""

from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter

from paceline_scheduler.core.live import PATIENCE_S, LiveRequest, Status
from paceline_scheduler.core.planning.forecast import Ahead


@dataclass(slots=True)
class _ModelQueue:
    """Beside each request its tokens to compute and to generate, 0 if it does not say."""

    requests: list[LiveRequest] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    max_output: list[int] = field(default_factory=list)

    def index(self, key: tuple[float, int]) -> int:
        return bisect_left(self.requests, key, key=attrgetter("queue_key"))

    def ahead_of(self, key: tuple[float, int], passed_over: Set[str]) -> Ahead:
        index = self.index(key)
        num_tokens, bounds = self.num_tokens[:index], self.max_output[:index]
        if passed_over:
            kept = [live.request.key.tenant not in passed_over for live in self.requests[:index]]
            num_tokens, bounds = list(compress(num_tokens, kept)), list(compress(bounds, kept))
        return Ahead(len(bounds), sum(num_tokens), len(bounds) - bounds.count(0), sum(bounds))


class WaitingQueue:
    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._of_tenants: dict[str, tuple[int, int]] = {}  # the same of each tenant
        self._queues: dict[str, _ModelQueue] = {}

    def add(self, live: LiveRequest) -> None:
        queue = self._queues.setdefault(live.request.model, _ModelQueue())
        index, num_tokens = queue.index(live.queue_key), live.num_own_tokens
        live.status = Status.WAITING
        queue.requests.insert(index, live)
        queue.num_tokens.insert(index, num_tokens)
        queue.max_output.insert(index, _max_rest(live))
        self._count(live, 1, num_tokens)

    def remove(self, live: LiveRequest) -> None:
        queue, index = self._queues[live.request.model], self.position(live)
        del queue.requests[index]
        self._count(live, -1, -queue.num_tokens.pop(index))
        del queue.max_output[index]
        if not queue.requests:
            del self._queues[live.request.model]

    def _count(self, live: LiveRequest, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        tenant = live.request.key.tenant
        own_requests, own_tokens = self.of_tenant(tenant)
        if own_requests + num_requests:
            self._of_tenants[tenant] = own_requests + num_requests, own_tokens + num_tokens
        else:
            del self._of_tenants[tenant]

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """Returns requests and tokens to compute."""
        return self._of_tenants.get(tenant, (0, 0))

    def position(self, live: LiveRequest) -> int:
        queue = self._queues[live.request.model]
        index = queue.index(live.queue_key)
        assert queue.requests[index] is live, "only what waits has a position"
        return index

    @property
    def all_ahead(self) -> Ahead:
        bounds = [bound for queue in self._queues.values() for bound in queue.max_output]
        return Ahead(self.num_requests, self.num_tokens, len(bounds) - bounds.count(0), sum(bounds))

    def models(self) -> tuple[str, ...]:
        return tuple(self._queues)

    def ahead_of(self, live: LiveRequest, full_tenants: Set[str] = frozenset()) -> Ahead:
        """Those of other tenants are not whose share of the blocks is full."""
        queue = self._queues.get(live.request.model, _ModelQueue())
        return queue.ahead_of(live.queue_key, full_tenants - {live.request.key.tenant})

    def ahead_of_usual(self, model: str, tenant: str, now: float, full_tenants: Set[str] = frozenset()) -> Ahead:
        """A usual request has priority 0 and no deadline."""
        queue = self._queues.get(model, _ModelQueue())
        return queue.ahead_of((now + PATIENCE_S, 1 << 62), full_tenants - {tenant})

    def all(self) -> tuple[LiveRequest, ...]:
        return tuple(live for queue in self._queues.values() for live in queue.requests)

    def of_model(self, model: str) -> Sequence[LiveRequest]:
        """The caller must not change it."""
        queue = self._queues.get(model)
        return () if queue is None else queue.requests


def _max_rest(live: LiveRequest) -> int:
    most = live.request.max_tokens
    return 0 if most is None else max(1, most - live.num_output_tokens)
