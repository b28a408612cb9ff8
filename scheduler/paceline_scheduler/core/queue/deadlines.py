"""When which request has to have ended: a heap that may hold requests which have ended long since."""

import heapq
from collections.abc import Callable

from paceline_scheduler.core.live import LiveRequest

_SLACK = 64


class Deadlines:
    """The deadlines of requests, soonest first. `is_open` tells whether one still counts."""

    def __init__(self, is_open: Callable[[LiveRequest], bool]) -> None:
        self._is_open = is_open
        self._heap: list[tuple[float, int, LiveRequest]] = []

    @property
    def is_empty(self) -> bool:
        """Whether no request has a deadline."""
        return not self._heap

    def watch(self, live: LiveRequest, num_open: int) -> None:
        """Remember the deadline of a request, if it has one; `num_open` is how many requests are open now."""
        if live.request.deadline_s is None:
            return
        if len(self._heap) > 2 * num_open + _SLACK:
            # Most of these requests ended in time; what is left of them must not pile up.
            self._heap = [watched for watched in self._heap if self._is_open(watched[2])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (live.request.deadline_s, live.arrival_number, live))

    def pop_passed(self, now: float) -> list[LiveRequest]:
        """Return the open requests whose deadline has passed; they are forgotten here."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            _, _, live = heapq.heappop(self._heap)
            if self._is_open(live):
                passed.append(live)
        return passed

    def next_s(self) -> float | None:
        """Return the soonest deadline of an open request."""
        while self._heap and not self._is_open(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
