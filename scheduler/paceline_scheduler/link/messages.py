"""The messages between scheduler and executor as plain data, independent of gRPC and protobuf."""

from dataclasses import dataclass
from enum import IntEnum

from paceline_scheduler.core.executors import ExecutorDescription, RowState
from paceline_scheduler.core.plan import BatchPlan, BlockTag, StepResult
from paceline_scheduler.holder import Holder


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The versions of the plan protocol that one side speaks, both ends included."""

    lowest: int
    highest: int

    def __contains__(self, version: int) -> bool:
        return self.lowest <= version <= self.highest

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}"

    def highest_in_common(self, other: "ProtocolRange") -> int:
        """Return the highest version that both speak, 0 if there is none."""
        version = min(self.highest, other.highest)
        return version if version in self and version in other else 0


PROTOCOLS = ProtocolRange(1, 2)
GROUPING_PROTOCOL = 2  # from this version on several plans, or results, may travel as one message


class ExecutorState(IntEnum):
    """Where an executor stands for its scheduler; the numbers are those of paceline.v1.ExecutorState."""

    CONNECTING = 1
    SYNCING = 2
    READY = 3
    DRAINING = 4
    LOST = 5


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as an executor describes it."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    num_parameters: int
    quantization: str


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Who an executor is and who drives it; `holder_scheduler_id` is empty when nobody does.

    An executor of an earlier release does not name its tokenizer, nor say how many schedulers stand in line.
    """

    incarnation: int
    term: int
    holder_scheduler_id: str
    vocab_size: int = 0
    tokenizer_digest: str = ""
    num_waiting_schedulers: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a plan stream. `address` is where clients reach this scheduler; empty when that is not known."""

    scheduler_id: str
    term: int
    protocols: ProtocolRange = PROTOCOLS
    takeover: bool = False
    address: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A peer is alive; an executor names the step it runs and for how long, 0 when idle."""

    running_step_id: int = 0
    running_ns: int = 0


@dataclass(frozen=True, slots=True)
class WaitingInLine:
    """Another scheduler holds the executor."""

    holder: Holder


@dataclass(frozen=True, slots=True)
class Welcome:
    """The executor accepted this scheduler; the snapshot follows."""

    description: ExecutorDescription
    model: ModelCard
    tokenizer_digest: str
    protocol: int = PROTOCOLS.highest


@dataclass(frozen=True, slots=True)
class RowPart:
    """One request of a snapshot, or the next piece of it: `is_continued` says that more of its columns follow."""

    row: RowState
    is_continued: bool


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part of an executor's state at the welcome."""

    rows: tuple[RowPart, ...]
    tags: tuple[BlockTag, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """The executor is going away: place nothing new there."""

    reason: str
    grace_s: float


ToExecutor = Hello | BatchPlan | Heartbeat
FromExecutor = WaitingInLine | Welcome | SnapshotPart | StepResult | Heartbeat | DrainNotice
