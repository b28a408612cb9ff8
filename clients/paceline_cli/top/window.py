"""Values of the last minute, and the value that a share of them does not exceed.

Apart, because what it computes is checked against another way of computing it.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

MAX_ENTRIES = 20_000


class Window:
    """Values with how often each came. Those of the last `seconds` count, and of these the newest `MAX_ENTRIES`."""

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds = seconds
        self._entries: deque[tuple[float, float, int]] = deque(maxlen=MAX_ENTRIES)  # when, value, how often

    def add(self, now_s: float, value: float, count: int = 1) -> None:
        self._entries.append((now_s, value, count))

    def quantiles(self, now_s: float, shares: Sequence[float]) -> tuple[float | None, ...]:
        """Return for each share, above 0 up to 1, the smallest value such that this share of the values is no larger:
        the nearest rank. None where there are no values.
        """
        while self._entries and self._entries[0][0] < now_s - self.seconds:
            self._entries.popleft()
        values = sorted((value, count) for _, value, count in self._entries)
        totals = list(accumulate(count for _, count in values))
        ranks = [math.ceil(share * totals[-1]) if totals else None for share in shares]
        return tuple(None if rank is None else values[bisect_left(totals, rank)][0] for rank in ranks)
