"""Everything that can happen to a scheduler's core, as values.

Knows no rule. What `Core.apply` raises it has not done. An event holds all that decides what comes of it, so that a run
can be repeated.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.plan.values import Claim, FinishReason, RecordId, StepResult
from paceline_scheduler.access.tenant_limits import TenantBounds
from paceline_scheduler.core.ended import EndedRequest
from paceline_scheduler.core.executor.attachment import StepInFlight
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.core.limits import LimitValues
from paceline_scheduler.core.outputs import Failure, FinishNotice, Resumed, TokenOutputs
from paceline_scheduler.core.request import Request

ReplyT = TypeVar("ReplyT")


class Event(Generic[ReplyT]):
    """Whoever feeds the event gets a `ReplyT` back."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Effects(Generic[ReplyT]):
    """`wake_at` is when the next Tick is due. `executors_to_plan` may have something new to do, the first of them
    first.
    """

    reply: ReplyT
    executors_to_plan: tuple[str, ...]
    wake_at: float | None
    tokens: tuple[TokenOutputs, ...] = ()
    failures: tuple[Failure, ...] = ()
    ended: tuple[EndedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class Submit(Event[None]):
    """All of them or none: raises a RequestRefusedError when one is not taken."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Resume(Event[tuple[Resumed, ...]]):
    """All of them or none; unknown ones are queued.

    Their handles get everything beyond what is returned, a former listener's handles nothing more. Raises
    StaleAttachmentError, ResumeMismatchError, DuplicateRequestError and what Submit raises.
    """

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Detach(Event[None]):
    """A resumable request goes on for `live.RESUME_WINDOW_S`, or less in others' way; another one is cancelled. Unknown
    handles are ignored.
    """

    handle: int


@dataclass(frozen=True, slots=True)
class EndCompletion(Event[FinishNotice | None]):
    """A stop text was found, or the client went away: the record is cut to `num_output_tokens`.

    Answers None for an unknown handle: the request may just have ended by itself.
    """

    handle: int
    num_output_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Cancel(Event[None]):
    """Raises UnknownRequestError."""

    key: RecordId


@dataclass(frozen=True, slots=True)
class Acknowledge(Event[None]):
    """Executors may forget the records. Unknown requests are ignored."""

    keys: tuple[RecordId, ...]


@dataclass(frozen=True, slots=True)
class Tick(Event[None]):
    """Fails what is late or cannot end in time, and gives up what no client has come back to."""


@dataclass(frozen=True, slots=True)
class ExpectExecutors(Event[None]):
    """Nothing is admitted before each was attached or lost."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExecutorAttached(Event[tuple[RecordId, ...]]):
    """Requests that its snapshot lacks wait again. Answers which go on there."""

    description: ExecutorDescription
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class StepFinished(Event[StepInFlight]):
    """Answers what was planned; raises DivergenceError when the result does not fit that."""

    address: str
    result: StepResult


@dataclass(frozen=True, slots=True)
class StreamEnded(Event[tuple[RecordId, ...]]):
    """Nothing is planned for the executor until it attaches again or is lost. Answers which requests it runs."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorLost(Event[None]):
    """Its requests run elsewhere, but for one that it must have died of."""

    address: str


@dataclass(frozen=True, slots=True)
class ExecutorRemoved(Event[None]):
    """What only it could hold fails."""

    address: str


@dataclass(frozen=True, slots=True)
class DrainExecutor(Event[int]):
    """Place nothing new there, and move what runs to others, until it comes back as another process.

    An operator, who may undo it, or the executor asked for it (`is_leaving`). Answers how many requests run there.
    Raises NoExecutorError before the first attachment.
    """

    address: str
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class UndrainExecutor(Event[None]):
    """Does nothing where it does not drain. Raises NoExecutorError before the first attachment, ExecutorLeavingError
    where it goes by itself.
    """

    address: str


@dataclass(frozen=True, slots=True)
class SetLimits(Event[None]):
    limits: LimitValues


@dataclass(frozen=True, slots=True)
class SetTenants(Event[None]):
    bounds: TenantBounds


@dataclass(frozen=True, slots=True)
class BeginDrain(Event[None]):
    """Submit and Resume raise DrainingError from now on."""


@dataclass(frozen=True, slots=True)
class BeginAnew(Event[None]):
    """Keep only the bounds; `active` has the requests now, if anyone.

    All listeners get the reason; executors keep the requests. `addresses` are the expected executors.
    """

    reason: str
    active: Claim | None
    addresses: tuple[str, ...]
