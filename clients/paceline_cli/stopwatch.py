"""Times one answer: how long until its first token, and how fast the others came. Pure: told the time."""

from collections.abc import Callable

# What comes in fewer messages, or within less time, says how messages were gathered and not how fast tokens are made.
_MIN_LATER_MESSAGES = 3
_MIN_SECONDS = 0.1


class Stopwatch:
    """Started when it is made."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._first: float | None = None
        self._last = self._started
        self._num_later_tokens = 0
        self._num_later_messages = 0

    def tokens_arrived(self, num_tokens: int) -> None:
        """Call it for every delta; deltas without tokens do not count."""
        if num_tokens == 0:
            return
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
        else:
            self._num_later_tokens += num_tokens
            self._num_later_messages += 1

    @property
    def time_to_first_token_seconds(self) -> float | None:
        """None while none has come."""
        return None if self._first is None else self._first - self._started

    @property
    def tokens_per_second(self) -> float | None:
        """The rate after the first delta, which is decoding alone; None where too little came to tell."""
        if self._first is None or self._num_later_messages < _MIN_LATER_MESSAGES:
            return None
        if self._last - self._first < _MIN_SECONDS:
            return None
        return self._num_later_tokens / (self._last - self._first)

    def summary(self) -> str:
        """Both in one line for people."""
        parts = []
        if self.time_to_first_token_seconds is not None:
            parts.append(f"time to first token {self.time_to_first_token_seconds * 1000:.0f} ms")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        return ", ".join(parts)
