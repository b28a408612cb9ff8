"""The requests that wait for an executor: one queue per model.

The most urgent request of a tenant is first, and within a priority tenants take turns: who holds the fewest rows comes
next. A priority keeps the places that its requests have by urgency alone, so priorities and patience weigh the same
whoever asks. A request's queue key never changes, so a preempted one, or one whose executor was lost, comes back to its
position; turns are computed when they are asked for.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from heapq import merge
from itertools import count, islice
from operator import attrgetter, itemgetter
from typing import overload

from paceline_scheduler.core.executor.group import ExecutorGroup
from paceline_scheduler.core.live import PATIENCE_S, LiveRequest, QueueKey, Status
from paceline_scheduler.core.planning.forecast import Ahead

_HeldRows = Callable[[str], int]
"""Of a tenant, on executors of the model."""


@dataclass(slots=True)
class _Line:
    """A tenant's requests of one priority, by urgency. Beside each its tokens to compute and to generate, 0 if it does
    not say.
    """

    requests: list[LiveRequest] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    max_output: list[int] = field(default_factory=list)

    def index(self, key: QueueKey) -> int:
        return bisect_left(self.requests, key, key=attrgetter("queue_key"))

    def insert(self, live: LiveRequest) -> None:
        index = self.index(live.queue_key)
        self.requests.insert(index, live)
        self.num_tokens.insert(index, live.num_own_tokens)
        self.max_output.insert(index, _max_rest(live))

    def remove(self, live: LiveRequest) -> int:
        """Returns its tokens to compute."""
        index = self.index(live.queue_key)
        assert self.requests[index] is live, "only what waits can be removed"
        del self.requests[index], self.max_output[index]
        return self.num_tokens.pop(index)

    def num_before(self, turn: int, key: QueueKey, num_held: int) -> int:
        """How many have an earlier turn, or the same one and are more urgent."""
        number = min(max(turn - num_held, 0), len(self.requests))
        is_next_ahead = number < len(self.requests) and number + num_held == turn
        return number + int(is_next_ahead and self.requests[number].queue_key < key)

    def first(self, number: int) -> Ahead:
        bounds = self.max_output[:number]
        return Ahead(number, sum(self.num_tokens[:number]), number - bounds.count(0), sum(bounds))


@dataclass(slots=True)
class _Priority:
    keys: list[QueueKey] = field(default_factory=list)  # of all requests, ascending: the places
    lines: dict[str, _Line] = field(default_factory=dict)  # by tenant

    def add(self, live: LiveRequest) -> None:
        insort(self.keys, live.queue_key)
        self.lines.setdefault(live.request.key.tenant, _Line()).insert(live)

    def remove(self, live: LiveRequest) -> int:
        tenant = live.request.key.tenant
        num_tokens = self.lines[tenant].remove(live)
        del self.keys[bisect_left(self.keys, live.queue_key)]
        if not self.lines[tenant].requests:
            del self.lines[tenant]
        return num_tokens

    def in_turn(self, held: _HeldRows) -> Iterator[LiveRequest]:
        turns = (zip(count(held(tenant)), line.requests, strict=False) for tenant, line in self.lines.items())
        return (live for _, live in merge(*turns, key=lambda turn: (turn[0], turn[1].queue_key)))

    def ahead_of(self, key: QueueKey, tenant: str, held: _HeldRows) -> dict[str, int]:
        """Requests of each tenant."""
        own = self.lines.get(tenant)
        turn = held(tenant) + (0 if own is None else own.index(key))
        return {other: line.num_before(turn, key, held(other)) for other, line in self.lines.items()}

    def place(self, rank: int, key: QueueKey) -> QueueKey:
        """The one of that rank, counted from 0, with this request among those that wait."""
        index = bisect_left(self.keys, key)
        if self.keys[index : index + 1] == [key] or rank < index:
            return self.keys[rank]
        return key if rank == index else self.keys[rank - 1]


class _InTurn(Sequence[LiveRequest]):
    """Finds as many as are looked at."""

    def __init__(self, num_requests: int, requests: Iterator[LiveRequest]) -> None:
        self._num_requests = num_requests
        self._requests = requests
        self._found: list[LiveRequest] = []

    def __len__(self) -> int:
        return self._num_requests

    @overload
    def __getitem__(self, index: int) -> LiveRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[LiveRequest]: ...
    def __getitem__(self, index: int | slice) -> LiveRequest | list[LiveRequest]:
        stop = index.stop if isinstance(index, slice) else index + 1
        num_missing = (self._num_requests if stop is None else stop) - len(self._found)
        if num_missing > 0:
            self._found += islice(self._requests, num_missing)
        return self._found[index]


@dataclass(slots=True)
class _ModelQueue:
    priorities: dict[int, _Priority] = field(default_factory=dict)

    def add(self, live: LiveRequest) -> None:
        self.priorities.setdefault(live.request.priority, _Priority()).add(live)

    def remove(self, live: LiveRequest) -> int:
        priority = self.priorities[live.request.priority]
        num_tokens = priority.remove(live)
        if not priority.keys:
            del self.priorities[live.request.priority]
        return num_tokens

    def in_turn(self, held: _HeldRows) -> Sequence[LiveRequest]:
        """The caller must not change it, and forgets it when the queue changes."""
        priorities = self.priorities.values()
        if len(priorities) == 1 and len(lines := [*next(iter(priorities)).lines.values()]) == 1:
            return lines[0].requests
        places = (zip(priority.keys, priority.in_turn(held), strict=True) for priority in priorities)
        requests = (live for _, live in merge(*places, key=itemgetter(0)))
        return _InTurn(sum(len(priority.keys) for priority in priorities), requests)

    def ahead_of(self, key: QueueKey, priority: int, tenant: str, held: _HeldRows) -> list[tuple[str, Ahead]]:
        """Of each tenant, several times where there are several priorities."""
        own = self.priorities.get(priority, _Priority())
        ahead = own.ahead_of(key, tenant, held)
        found = [(other, own.lines[other].first(number)) for other, number in ahead.items()]
        place = own.place(sum(ahead.values()), key)
        for another in self.priorities.values():
            if another is not own:
                num_before = bisect_left(another.keys, place)
                before = Counter(live.request.key.tenant for live in islice(another.in_turn(held), num_before))
                found += [(other, another.lines[other].first(number)) for other, number in before.items()]
        return found


class WaitingQueue:
    def __init__(self, executors: ExecutorGroup) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._of_tenants: dict[str, tuple[int, int]] = {}  # the same of each tenant
        self._queues: dict[str, _ModelQueue] = {}
        self._executors = executors

    def add(self, live: LiveRequest) -> None:
        live.status = Status.WAITING
        self._queues.setdefault(live.request.model, _ModelQueue()).add(live)
        self._count(live, 1, live.num_own_tokens)

    def remove(self, live: LiveRequest) -> None:
        queue = self._queues[live.request.model]
        self._count(live, -1, -queue.remove(live))
        if not queue.priorities:
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

    def takes_requests(self, number: int, tenant: str, most: int) -> bool:
        """Within an equal part a tenant finds room however full the others have made the queue."""
        own, _ = self.of_tenant(tenant)
        return self.num_requests + number <= most or own + number <= most // self._num_sharing(tenant)

    def takes_tokens(self, number: int, tenant: str, most: int) -> bool:
        _, own = self.of_tenant(tenant)
        return self.num_tokens + number <= most or own + number <= most // self._num_sharing(tenant)

    def _num_sharing(self, tenant: str) -> int:
        return len(self._of_tenants) + (tenant not in self._of_tenants)

    def position(self, live: LiveRequest) -> int:
        return self.ahead_of(live).num_requests

    @property
    def all_ahead(self) -> Ahead:
        priorities = (priority for queue in self._queues.values() for priority in queue.priorities.values())
        lines = (line for priority in priorities for line in priority.lines.values())
        return sum((line.first(len(line.requests)) for line in lines), Ahead())

    def models(self) -> tuple[str, ...]:
        return tuple(self._queues)

    def ahead_of(self, live: LiveRequest, full_tenants: Set[str] = frozenset()) -> Ahead:
        """Those of other tenants are not whose share of the blocks is full."""
        request = live.request
        return self._ahead_of(live.queue_key, request.model, request.priority, request.key.tenant, full_tenants)

    def ahead_of_usual(self, model: str, tenant: str, now: float, full_tenants: Set[str] = frozenset()) -> Ahead:
        """A usual request has priority 0 and no deadline."""
        return self._ahead_of((now + PATIENCE_S, 1 << 62), model, 0, tenant, full_tenants)

    def _ahead_of(self, key: QueueKey, model: str, priority: int, tenant: str, full_tenants: Set[str]) -> Ahead:
        queue = self._queues.get(model)
        if queue is None:
            return Ahead()
        found = queue.ahead_of(key, priority, tenant, self._held_rows(model))
        return sum((ahead for other, ahead in found if other == tenant or other not in full_tenants), Ahead())

    def all(self) -> tuple[LiveRequest, ...]:
        return tuple(live for model in self._queues for live in self.of_model(model))

    def of_model(self, model: str) -> Sequence[LiveRequest]:
        """In the order in which they are placed. The caller must not change it."""
        queue = self._queues.get(model)
        return () if queue is None else queue.in_turn(self._held_rows(model))

    def _held_rows(self, model: str) -> _HeldRows:
        rows = [executor.rows.num_of_tenant for executor in self._executors if executor.description.model == model]
        return lambda tenant: sum(of_executor.get(tenant, 0) for of_executor in rows)


def _max_rest(live: LiveRequest) -> int:
    most = live.request.max_tokens
    return 0 if most is None else max(1, most - live.num_output_tokens)
