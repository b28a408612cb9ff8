"""What happened to the streams, fault by fault: pauses, failures and mismatches.

Knows times of deltas, in seconds of one monotonic clock. Refuses to know how streams are read and faults are done.
A fault's window lasts until the next one begins; what goes wrong meanwhile is counted for it.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from paceline_cli.chaos.comparison import Mismatches

UNDISTURBED = "(no fault)"
"""The kind of the window before the first fault: what pauses look like when nothing happens."""


_UNDER_WAY_S = 0.2
"""For so long tokens may arrive that had left before the fault."""


@dataclass(slots=True, eq=False)
class StreamProgress:
    name: str
    pauses_by_itself: bool = False
    """Whether it was asked to deliver several tokens at a time: then its pauses are no stalls, and are not measured."""
    began_s: float = 0.0
    last_delta_s: float | None = None
    num_tokens: int = 0

    def waited_s(self, now_s: float) -> float:
        """Since its latest delta, or since it was sent."""
        return now_s - (self.began_s if self.last_delta_s is None else self.last_delta_s)


@dataclass(slots=True)
class SeenTimes:
    """What clients saw of completions that came to their ends, added up, in seconds."""

    num_completions: int = 0
    num_placed_again: int = 0
    first_token_s: float = 0.0
    between_tokens_s: float = 0.0
    per_token_s: float = 0.0
    whole_s: float = 0.0
    longest_s: float = 0.0
    """The whole time of the longest."""

    def add(self, began_s: float, first_s: float, end_s: float, num_tokens: int, attempt: int) -> None:
        self.num_completions += 1
        self.num_placed_again += attempt - 1
        self.first_token_s += first_s - began_s
        self.between_tokens_s += end_s - first_s
        self.per_token_s += (end_s - first_s) / max(num_tokens - 1, 1)
        self.whole_s += end_s - began_s
        self.longest_s = max(self.longest_s, end_s - began_s)


@dataclass(slots=True)
class RankEnds:
    """Of executors of several ranks."""

    seconds: list[float] = field(default_factory=list)
    """How long after the fault each of them had ended."""
    num_left: int = 0
    """Processes of theirs that were there seconds later."""


@dataclass(slots=True)
class FaultWindow:
    """One fault and the time until the next."""

    kind: str
    detail: str
    began_s: float
    num_in_flight: int
    """Streams that had begun to deliver and not ended when it began; their pauses are what is measured."""
    stalls: dict[StreamProgress, float] = field(default_factory=dict)
    """The pause between two deltas of each of them at the fault, in seconds: the longest that had begun when it came,
    or that began while what was under way arrived."""
    longest: dict[StreamProgress, float] = field(default_factory=dict)
    """The longest of all that lie behind the beginning, whatever their cause."""
    silence_seconds: float = 0.0
    """The longest time in which no stream at all got anything."""
    settled_seconds: float | None = None
    """How long it took until every one of these streams had got something, and the system was whole again."""
    is_given_up: bool = False
    """Whether that took longer than was waited for."""
    num_tokens: int = 0
    num_done: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    mismatches: Mismatches = field(default_factory=Mismatches)
    ranks: RankEnds = field(default_factory=RankEnds)
    untrue: list[str] = field(default_factory=list)
    """What metrics claimed of it that is not what clients saw."""

    @property
    def num_failed(self) -> int:
        return self.failures.total()


class ChaosLedger:
    """Hears about every delta and keeps the windows."""

    def __init__(self, now_s: float) -> None:
        self.windows = [FaultWindow(UNDISTURBED, "", now_s, 0)]
        self.running: set[StreamProgress] = set()
        self.seen = SeenTimes()
        self.first_failure: str | None = None
        self._last_delta_s: float | None = None
        self._longest_waits_s = deque([0.0], maxlen=2)  # by window
        self._num_flowing = 0  # streams that have ever delivered something
        self._waiting: set[StreamProgress] = set()

    @property
    def current(self) -> FaultWindow:
        return self.windows[-1]

    @property
    def is_in_full_flow(self) -> bool:
        """Whether as many streams have begun to deliver as there are at a time."""
        return 0 < len(self.running) <= self._num_flowing

    @property
    def num_waiting(self) -> int:
        """How many of the streams that the latest fault found have got nothing since."""
        return len(self._waiting)

    def longest_wait_s(self, now_s: float) -> float:
        """Over or not, in the present window or the one before: what that lost may come back only now.

        A bound of what anybody may say of it.
        """
        return max([*self._longest_waits_s, *(stream.waited_s(now_s) for stream in self.running)])

    def open_window(self, kind: str, detail: str, now_s: float) -> FaultWindow:
        self.close(now_s)
        found = {stream for stream in self.running if stream.last_delta_s is not None}
        self._waiting = set(found)
        # Before the fault is before the window: a pause counts from the last delta on, even if that came earlier.
        none_yet = {stream: 0.0 for stream in found if not stream.pauses_by_itself}
        window = FaultWindow(kind, detail, now_s, len(found), stalls=dict(none_yet), longest=none_yet)
        self.windows.append(window)
        self._longest_waits_s.append(0.0)
        return window

    def close(self, now_s: float) -> None:
        """Nothing more is waited for: pauses that have not ended count as far as they got."""
        for stream in self.current.longest.keys() & self.running:
            self._paused(stream, now_s)
        self._silent_until(now_s)

    def began(self, stream: StreamProgress) -> None:
        self.running.add(stream)

    def arrived(self, stream: StreamProgress, num_tokens: int, mismatches: Mismatches, now_s: float) -> None:
        window = self.current
        self._longest_waits_s[-1] = max(self._longest_waits_s[-1], stream.waited_s(now_s))
        self._paused(stream, now_s)
        self._waiting.discard(stream)
        self._silent_until(now_s)
        window.num_tokens += num_tokens
        self._num_flowing += stream.last_delta_s is None
        window.mismatches.add(mismatches)
        stream.num_tokens += num_tokens
        stream.last_delta_s = self._last_delta_s = now_s

    def done(self, stream: StreamProgress, mismatches: Mismatches) -> None:
        self.current.num_done += 1
        self.current.mismatches.add(mismatches)
        self._ended(stream)

    def failed(self, stream: StreamProgress, reason: str, words: str) -> None:
        self.current.failures[reason] += 1
        self.first_failure = self.first_failure or f"{stream.name}: {words}"
        self._ended(stream)

    def left(self, stream: StreamProgress) -> None:
        """A stream was left before its end, by us: it counts nowhere."""
        self._ended(stream)

    def _ended(self, stream: StreamProgress) -> None:
        self.running.discard(stream)
        self._waiting.discard(stream)

    def _silent_until(self, now_s: float) -> None:
        if self._last_delta_s is not None:
            self.current.silence_seconds = max(self.current.silence_seconds, now_s - self._last_delta_s)

    def _paused(self, stream: StreamProgress, now_s: float) -> None:
        window = self.current
        if stream in window.longest and stream.last_delta_s is not None:
            pause_s = now_s - stream.last_delta_s
            window.longest[stream] = max(window.longest[stream], pause_s)
            if stream.last_delta_s <= window.began_s + _UNDER_WAY_S:
                window.stalls[stream] = max(window.stalls[stream], pause_s)
