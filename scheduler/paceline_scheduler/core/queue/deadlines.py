"""What is due when for which request: a heap that may hold what is not due any more."""

import heapq
from collections.abc import Callable

from paceline_scheduler.core.live import LiveRequest

_SLACK = 64


class Deadlines:
    """`is_due` tells whether a time still counts."""

    def __init__(self, is_due: Callable[[LiveRequest, float], bool]) -> None:
        self._is_due = is_due
        self._heap: list[tuple[float, int, LiveRequest]] = []
        self._num_watched = 0

    @property
    def is_empty(self) -> bool:
        return not self._heap

    def watch(self, live: LiveRequest, at_s: float, num_open: int) -> None:
        """`num_open` requests are open now."""
        if len(self._heap) > 2 * num_open + _SLACK:
            # Most of these requests ended in time and must not pile up.
            self._heap = [watched for watched in self._heap if self._is_due(watched[2], watched[0])]
            heapq.heapify(self._heap)
        self._num_watched += 1
        heapq.heappush(self._heap, (at_s, self._num_watched, live))

    def pop_passed(self, now: float) -> list[LiveRequest]:
        """Returns each request once."""
        passed: dict[LiveRequest, None] = {}
        while self._heap and self._heap[0][0] <= now:
            at_s, _, live = heapq.heappop(self._heap)
            if self._is_due(live, at_s):
                passed[live] = None
        return list(passed)

    def next_s(self) -> float | None:
        while self._heap and not self._is_due(self._heap[0][2], self._heap[0][0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
