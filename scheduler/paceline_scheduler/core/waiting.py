"""The queue of requests that wait for an executor, first come, first served per model.

A preempted request, or one whose executor was lost, comes back with its arrival number and so keeps its place. The
bounds of the queue are for newcomers; the core checks them at submission.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from paceline_scheduler.core.live import LiveRequest, Status


class WaitingQueue:
    """One line per model, sorted by arrival: newcomers append, returning requests are put back where they belong."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._lines: dict[str, list[LiveRequest]] = defaultdict(list)

    def add(self, live: LiveRequest) -> None:
        """Let a request wait at the place its arrival number gives it."""
        line = self._lines[live.request.model]
        live.status = Status.WAITING
        line.insert(bisect_left(line, live.arrival_number, key=_arrival_number), live)
        self.num_requests += 1
        self.num_tokens += live.num_known_tokens

    def remove(self, live: LiveRequest) -> None:
        """Take a request out, wherever it stands."""
        line = self._lines[live.request.model]
        index = bisect_left(line, live.arrival_number, key=_arrival_number)
        assert line[index] is live, "only what waits can be removed"
        del line[index]
        self.num_requests -= 1
        self.num_tokens -= live.num_known_tokens

    def all(self) -> tuple[LiveRequest, ...]:
        """Return everything that waits."""
        return tuple(live for line in self._lines.values() for live in line)

    def line(self, model: str) -> Sequence[LiveRequest]:
        """Return the requests that wait for a model, oldest first; not to be changed."""
        return self._lines.get(model, ())


def _arrival_number(live: LiveRequest) -> int:
    return live.arrival_number
