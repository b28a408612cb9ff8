"""What is on its way between processes, in virtual time, and what goes wrong with it: as much as a budget allows.

Messages take 5 ms and keep their order on a channel. That one is late is a choice, as is a fault after any event; with
a budget of so many of each, a generator tries them at every place and together.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from exhaustive.gen import Gen

Do = Callable[[], None]
Fault = tuple[str, str, Do]
"""Its kind, its name and what happens."""
Budget = Mapping[str, int]
"""How many of each kind at most."""
MESSAGE_S = 0.005
LATE = "late"


class WrongError(AssertionError):
    """Something happened that must not."""


def require(holds: object, sentence: str, story: Sequence[str] = ()) -> None:
    """Raise a WrongError where a rule is broken."""
    if not holds:
        raise WrongError("\n".join((*story, f"=> it is not so that {sentence}")))


class Clockwork:
    """Events by their time. `late_s` are the delays of messages to choose from."""

    def __init__(self, gen: Gen, budget: Budget, late_s: tuple[float, ...]) -> None:
        self.gen = gen
        self.now_s = 0.0
        self.left = Counter(budget)
        self._budget = budget
        self.told: list[str] = []
        self._late_s = late_s
        self._is_disturbed = False
        self._events: list[tuple[float, int, Do]] = []
        self._beats: list[tuple[float, int, Do]] = []  # that come again and again
        self._numbers = itertools.count()
        self._last_s: dict[Hashable, float] = {}  # arrival on each channel

    def tell(self, sentence: str) -> None:
        self.told.append(f"{self.now_s:8.3f} {sentence}")

    def require(self, holds: object, sentence: str) -> None:
        """Raise a WrongError with the story of this run where a rule is broken."""
        require(holds, sentence, self.told)

    def later(self, seconds: float, do: Do) -> None:
        heapq.heappush(self._events, (round(self.now_s + seconds, 6), next(self._numbers), do))

    def every(self, seconds: float, do: Do) -> None:
        """Let something happen again and again: it is no event before which anything goes wrong."""

        def beat() -> None:
            do()
            heapq.heappush(self._beats, (round(self.now_s + seconds, 6), next(self._numbers), beat))

        heapq.heappush(self._beats, (round(self.now_s + seconds, 6), next(self._numbers), beat))

    @property
    def is_quiet(self) -> bool:
        return not self._events

    def send(self, channel: Hashable, do: Do) -> float:
        """Let a message arrive, behind those on the same channel; returns after how many seconds."""
        seconds = MESSAGE_S
        if self.may(LATE) and (late := self.gen.int_inclusive(len(self._late_s))):
            self.left[LATE] -= 1
            seconds = self._late_s[late - 1]
            self.tell(f"what goes to {channel} takes {seconds:g} s")
        at_s = max(self.now_s + seconds, self._last_s.get(channel, 0.0))
        self._last_s[channel] = at_s
        self.later(at_s - self.now_s, do)
        return at_s - self.now_s

    def may(self, kind: str) -> bool:
        """Whether something of this kind may go wrong now."""
        return self._is_disturbed and self.left[kind] > 0

    def run(self, seconds: float, faults: Callable[[], list[Fault]] | None = None) -> None:
        """Let time pass. `faults` are those that are possible; each may happen after any event, as long as there is
        budget for its kind.
        """
        until_s, self._is_disturbed = self.now_s + seconds, faults is not None
        if faults is not None:
            self._disturb(faults)
        while events := [each for each in (self._events, self._beats) if each and each[0][0] <= until_s]:
            first = min(events)
            self.now_s, _, do = heapq.heappop(first)
            do()
            if faults is not None and first is self._events:
                self._disturb(faults)
        self.now_s, self._is_disturbed = until_s, False

    def _disturb(self, faults: Callable[[], list[Fault]]) -> None:
        while any(number for kind, number in self.left.items() if kind != LATE):
            possible = [fault for fault in faults() if self.left[fault[0]]]
            chosen = self.gen.int_inclusive(len(possible)) if possible else 0
            if not chosen:
                return
            kind, name, do = possible[chosen - 1]
            self.left[kind] -= 1
            self.tell(f"* {name}")
            do()
