"""What would become of a new request, for those who tell it to the world outside; and whether anybody is served."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from paceline_scheduler.backend import ExecutorStatus
from paceline_scheduler.holder import Holder
from paceline_scheduler.link.attachment import Attachment
from paceline_scheduler.link.messages import ExecutorState

# Of these it is known what they run, or that they run nothing that can be gone on with soon.
_KNOWN = frozenset({ExecutorState.READY, ExecutorState.DRAINING, ExecutorState.LOST})


class Standing(Enum):
    """What a new request meets here."""

    UNREADY = "no executor takes it"
    STANDING_BY = "another scheduler drives the executors, and this one waits in line"
    READY = "it is run"


@dataclass(frozen=True, slots=True)
class Readiness:
    """How a scheduler stands. While it stands by, `active` is the one that drives the executors."""

    standing: Standing
    active: Holder | None = None


def readiness_of(executors: Iterable[Attachment], active: Holder | None) -> Readiness:
    """Return how a scheduler stands that takes requests; `active` is the one that they are sent to, if to any."""
    if active is not None:
        return Readiness(Standing.STANDING_BY, active)
    is_served = any(executor.is_serving and not executor.is_draining for executor in executors)
    return Readiness(Standing.READY if is_served else Standing.UNREADY)


def is_at_rest(standing: Standing, executors: Sequence[ExecutorStatus], num_waiting: int) -> bool:
    """Whether nobody is served here, and nobody can come back to what runs or waits; `num_waiting` requests wait."""
    if standing is Standing.STANDING_BY:
        return True
    are_idle = all(executor.state in _KNOWN and not executor.num_running_requests for executor in executors)
    return bool(executors) and are_idle and not num_waiting
