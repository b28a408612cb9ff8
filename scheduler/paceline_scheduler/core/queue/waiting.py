"""The queue of requests that wait for an executor: one line per model, the most urgent first.

A request's place is fixed when it is submitted (`place_of`), so a preempted one, or one whose executor was
lost, comes back to where it was. The bounds of the queue are for newcomers; the core checks them at submission.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline_scheduler.core.live import PATIENCE_S, LiveRequest, Status
from paceline_scheduler.core.planning.forecast import Ahead


@dataclass(slots=True)
class _Line:
    """Requests in order, and beside each, for adding up, the tokens it has to compute and those it may generate.

    The latter are 0 for a request that does not say.
    """

    requests: list[LiveRequest] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    max_output: list[int] = field(default_factory=list)

    def index(self, place: tuple[float, int]) -> int:
        return bisect_left(self.requests, place, key=_place)

    def ahead_of(self, place: tuple[float, int]) -> Ahead:
        index = self.index(place)
        bounds = self.max_output[:index]
        return Ahead(index, sum(self.num_tokens[:index]), index - bounds.count(0), sum(bounds))


class WaitingQueue:
    """One sorted line per model."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._lines: dict[str, _Line] = {}

    def add(self, live: LiveRequest) -> None:
        line = self._lines.setdefault(live.request.model, _Line())
        index, num_tokens = line.index(live.place), live.num_own_tokens
        live.status = Status.WAITING
        line.requests.insert(index, live)
        line.num_tokens.insert(index, num_tokens)
        line.max_output.insert(index, _max_rest(live))
        self.num_requests += 1
        self.num_tokens += num_tokens

    def remove(self, live: LiveRequest) -> None:
        line, index = self._lines[live.request.model], self.position(live)
        del line.requests[index]
        self.num_requests -= 1
        self.num_tokens -= line.num_tokens.pop(index)
        del line.max_output[index]
        if not line.requests:
            del self._lines[live.request.model]

    def position(self, live: LiveRequest) -> int:
        line = self._lines[live.request.model]
        index = line.index(live.place)
        assert line.requests[index] is live, "only what waits has a position"
        return index

    @property
    def all_ahead(self) -> Ahead:
        """Return all that waits, as it would be ahead of one more."""
        bounds = [bound for line in self._lines.values() for bound in line.max_output]
        return Ahead(self.num_requests, self.num_tokens, len(bounds) - bounds.count(0), sum(bounds))

    def models(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def ahead_of(self, live: LiveRequest) -> Ahead:
        return self._lines.get(live.request.model, _Line()).ahead_of(live.place)

    def ahead_of_usual(self, model: str, now: float) -> Ahead:
        """Return what would be ahead of a request of priority 0 without a deadline."""
        return self._lines.get(model, _Line()).ahead_of((now + PATIENCE_S, 1 << 62))

    def all(self) -> tuple[LiveRequest, ...]:
        return tuple(live for line in self._lines.values() for live in line.requests)

    def line(self, model: str) -> Sequence[LiveRequest]:
        """Return the requests that wait for a model, the most urgent first; not to be changed."""
        line = self._lines.get(model)
        return () if line is None else line.requests


def _max_rest(live: LiveRequest) -> int:
    most = live.request.max_tokens
    return 0 if most is None else max(1, most - live.num_output_tokens)


def _place(live: LiveRequest) -> tuple[float, int]:
    return live.place
