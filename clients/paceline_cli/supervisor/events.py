"""What a supervisor tells about its children, and who listens. Values only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline_cli.supervisor.log_lines import Level


@dataclass(frozen=True, slots=True)
class Program:
    """A process to run: its name for people, and its command with the full path of the program first."""

    name: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()  # variables beside this process's
    stop_stage: int = 0
    """When it is asked to end: after all of lower stages have ended, at once with those of its own."""
    retell: Callable[[str], str] = str
    """What it says of its end, in words for whoever runs this program instead."""
    leaves_children: bool = False
    """Whether what it has started itself is left to end by itself when it has ended, for somebody who looks."""
    min_restart_seconds: float = 0.0
    """How long it is left dead at least. Where another process stands in, its start would only be in that one's way."""


@dataclass(frozen=True, slots=True)
class Started:
    name: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """It is busy becoming ready. `fraction` is 0 to 1, None where it does not say."""

    name: str
    phase: str
    fraction: float | None


@dataclass(frozen=True, slots=True)
class BecameReady:
    """It serves, or stands by to do so."""

    name: str
    stands_by: bool = False


@dataclass(frozen=True, slots=True)
class TookOver:
    """It stood by and serves now."""

    name: str


@dataclass(frozen=True, slots=True)
class Printed:
    """It printed a line, whatever it means; the event for what it means follows."""

    name: str
    line: bytes


@dataclass(frozen=True, slots=True)
class Said:
    """It printed something for people."""

    name: str
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Exited:
    """It ended by itself. `restart_in_seconds` is None when it is not started again."""

    name: str
    exit_code: int
    last_error: str | None
    restart_in_seconds: float | None


@dataclass(frozen=True, slots=True)
class FinishingRequests:
    """It ends once so many requests have."""

    name: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class StillRunning:
    """It was asked to end and has not yet; after so many seconds it is killed. 0 requests: it did not say how many."""

    name: str
    seconds: float
    num_requests: int = 0


ChildEvent = Started | Progressed | BecameReady | TookOver | Printed | Said | Exited | FinishingRequests | StillRunning


class ChildListener(Protocol):
    """Hears about everything that happens to the children, in order."""

    def on_event(self, event: ChildEvent) -> None:
        """Take note. Must not block and must not raise."""


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words; a negative code is the signal that killed it."""
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
