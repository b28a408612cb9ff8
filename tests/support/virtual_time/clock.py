"""A clock that moves only when a test says so."""


class ManualClock:
    """Monotonic seconds, or what a test counts by; call it for the time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> float:
        assert seconds >= 0, "a monotonic clock does not go back"
        self._now_s += seconds
        return self._now_s
