"""The messages of the plan stream that are neither plan nor result, and the seam to whatever carries them."""

from dataclasses import dataclass
from typing import Protocol

from paceline_executor.link.fence import Approach, Claim
from paceline_executor.rows.plan import BatchPlan, StepResult, StepTimings
from paceline_executor.rows.snapshot import SnapshotPart

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The versions of the plan protocol that one side speaks, both ends included; made of what a peer says as it is."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}"

    def pick(self, other: "ProtocolRange") -> int | None:
        """The highest version that both speak, or None."""
        version = min(self.highest, other.highest)
        return version if version >= max(self.lowest, other.lowest) else None


PROTOCOLS = ProtocolRange(1, 2)
GROUPING_PROTOCOL = 2  # from this version on several plans, or results, may travel as one message


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a scheduler."""

    claim: Claim
    protocols: ProtocolRange
    approach: Approach
    tag_key_digest: bytes  # empty: the scheduler will use the executor's key


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life; names the running step, 0 when idle."""

    running_step_id: int = 0
    running_ns: int = 0


@dataclass(frozen=True, slots=True)
class WaitingInLine:
    """Somebody else holds the executor."""

    holder: Claim


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that failed as a whole; the sentence is fit for the client of a request."""

    epoch: int
    step_id: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The scheduler drives from now on, in this version of the protocol. `failed_step` is the last one that failed."""

    epoch: int
    protocol: int
    failed_step: FailedStep | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """The executor is going away."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step was executed."""

    result: StepResult
    timings: StepTimings


@dataclass(frozen=True, slots=True)
class StepsDone:
    """Steps that were executed, in order, at least one; several as one message from GROUPING_PROTOCOL on."""

    steps: tuple[StepDone, ...]


Incoming = Hello | BatchPlan | Heartbeat
Outgoing = WaitingInLine | Welcome | SnapshotPart | StepsDone | Heartbeat | Drain


class Transport(Protocol):
    """Carries one plan stream. A broken connection cancels whoever is using it."""

    async def receive(self) -> Incoming | None:
        """The next message, or None when the scheduler will send no more. Raises PlanError or AttachError."""
        ...

    async def send(self, message: Outgoing) -> None:
        """Send a message; returns when the connection has taken it."""
        ...
