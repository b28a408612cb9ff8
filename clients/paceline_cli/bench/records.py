"""What one request was and what came back, as raw times. Refuses to know statistics.

The definitions are those of `vllm bench serve`. Each message that carries tokens is one point in time: the first one
makes the TTFT, each further one a gap (ITL), however many tokens it carries; the last one is the end. TPOT is the time
from the first to the last, divided by the tokens after the first.
"""

import itertools
from dataclasses import dataclass, field

from paceline_cli.bench.rungs import Rung
from paceline_cli.bench.workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class Counted:
    """The tokens of a request that was answered."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None = None
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    """Prompt tokens from the prefix cache; None where the target does not say."""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    kind: str
    message: str


@dataclass(slots=True)
class Record:
    """One request that was sent. Times are readings of one monotonic clock, in seconds."""

    planned: PlannedRequest
    due: float | None
    """When it should have been sent; None where there was no such time."""
    started: float
    times: list[float] = field(default_factory=list)
    """The arrivals of messages with tokens, in order."""
    outcome: Counted | RequestFailure | None = None
    """None while it runs, and for good when it was interrupted."""


@dataclass(slots=True)
class RungRun:
    """One rung as it runs, and when it has ended. Times are in seconds of the clock."""

    rung: Rung
    started: float
    records: list[Record] = field(default_factory=list)
    """In the order in which they were sent."""
    ended: float | None = None
    """None while it runs."""

    @property
    def duration_seconds(self) -> float:
        """From the start to the end of the last request."""
        if self.ended is None:
            raise ValueError("the rung is still running")
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that was answered, with at least one token."""

    planned: PlannedRequest
    started: float
    times: list[float]
    counted: Counted

    @property
    def ttft(self) -> float:
        """Seconds until the first message with tokens."""
        return self.times[0] - self.started

    @property
    def itls(self) -> list[float]:
        """Seconds between one message with tokens and the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]

    @property
    def latency(self) -> float:
        """Seconds from sending to the last message with tokens."""
        return self.times[-1] - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None when there is no second one."""
        num_later_tokens = self.counted.num_output_tokens - 1
        return (self.times[-1] - self.times[0]) / num_later_tokens if num_later_tokens > 0 else None


def answer_of(record: Record) -> Answer | None:
    """None for one that failed or was interrupted."""
    if isinstance(record.outcome, Counted):
        return Answer(record.planned, record.started, record.times, record.outcome)
    return None
