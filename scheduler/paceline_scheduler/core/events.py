"""Everything that can happen to a scheduler's core, as values, and what comes of it.

Knows no rule. `Core.apply` takes each of these with the time; what it raises it has not done. `Event[ReplyT]` says what
whoever feeds the event gets back. An event holds all that decides what comes of it, so that a run can be repeated.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.plan.values import FinishReason, RecordId, StepResult
from paceline_scheduler.core.executor.state import StepInFlight
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.core.limits import LimitValues
from paceline_scheduler.core.outputs import Outputs, Resumed, Spent
from paceline_scheduler.core.request import Request, Resumption
from paceline_scheduler.holder import Holder

ReplyT = TypeVar("ReplyT")


class Event(Generic[ReplyT]):
    """Something that happens. Subclasses are frozen values; `ReplyT` is what is answered."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Effects(Generic[ReplyT]):
    """What an event caused: the answer, outputs for the edge, and when the next Tick is due, None for never.

    `executors_to_plan` are the addresses of executors that may have something new to do, the first of them first.
    """

    reply: ReplyT
    outputs: Outputs
    executors_to_plan: tuple[str, ...]
    wake_at: float | None


# Requests


@dataclass(frozen=True, slots=True)
class Submit(Event[None]):
    """Queue all completions of a request, or none: raises a RequestRefusedError when one is not taken."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Resume(Event[tuple[Resumed, ...]]):
    """Attach listeners to all completions of a request, or to none; unknown ones are queued.

    Their handles get everything beyond what is returned, a former listener's handles nothing more. Raises
    StaleAttachmentError, ResumeMismatchError, DuplicateRequestError and what Submit raises.
    """

    resumptions: tuple[Resumption, ...]


@dataclass(frozen=True, slots=True)
class Detach(Event[None]):
    """Nobody listens to a request for now: a resumable one goes on for `live.RESUME_WINDOW_S`, or less in others' way.

    Another one is cancelled at once; unknown handles are ignored.
    """

    handle: int


@dataclass(frozen=True, slots=True)
class End(Event[Spent]):
    """The edge ends a request: a stop text was found, or the client went away.

    Its record is cut to `num_output_tokens`. Unknown handles are ignored: the request may just have ended by itself.
    """

    handle: int
    num_output_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Cancel(Event[None]):
    """End a request as CANCELLED and tell its stream; raises UnknownRequestError."""

    key: RecordId


@dataclass(frozen=True, slots=True)
class Acknowledge(Event[None]):
    """Clients have all of these requests: executors may forget the records. Unknown ones are ignored."""

    keys: tuple[RecordId, ...]


# Time


@dataclass(frozen=True, slots=True)
class Tick(Event[None]):
    """Time has passed: fail what is late or cannot end in time, and give up what no client has come back to."""


# Executors


@dataclass(frozen=True, slots=True)
class ExpectExecutors(Event[None]):
    """These executors are looked for: nothing is admitted before each was attached or lost."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExecutorAttached(Event[None]):
    """An executor is driven from now on, as its snapshot shows it; requests it lost wait again."""

    description: ExecutorDescription
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class StepFinished(Event[StepInFlight]):
    """A result arrived; answers what was planned, and raises DivergenceError when the result does not fit that."""

    address: str
    result: StepResult


@dataclass(frozen=True, slots=True)
class StreamEnded(Event[None]):
    """The stream to an executor ended: nothing is planned for it until it attaches again or is lost."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorLost(Event[None]):
    """An executor is gone as far as can be told: its requests run elsewhere, but for one that it must have died of."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorRemoved(Event[None]):
    """An executor is gone and not looked for any more: what only it could hold fails."""

    address: str


@dataclass(frozen=True, slots=True)
class DrainExecutor(Event[int]):
    """Place nothing new on an executor, and move what runs there to others; over once it comes back as another process.

    An operator asked for it, who may undo it, or the executor `is_leaving` by itself. Answers how many requests run
    there now. Raises NoExecutorError where it has not been attached yet.
    """

    address: str
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class UndrainExecutor(Event[None]):
    """Place requests on an executor again; no error where it does not drain.

    Raises NoExecutorError where it has not been attached yet, ExecutorLeavingError where it goes by itself.
    """

    address: str


# The scheduler itself


@dataclass(frozen=True, slots=True)
class SetLimits(Event[None]):
    """Change the bounds; the values are valid."""

    limits: LimitValues


@dataclass(frozen=True, slots=True)
class BeginDrain(Event[None]):
    """Take nothing new from now on: Submit and Resume raise DrainingError."""


@dataclass(frozen=True, slots=True)
class BeginAnew(Event[None]):
    """Forget everything but the bounds, as a scheduler that has just started: `active` has the requests now, if anyone.

    All listeners get the reason; executors keep the requests. `addresses` are those of the expected executors.
    """

    reason: str
    active: Holder | None
    addresses: tuple[str, ...]
