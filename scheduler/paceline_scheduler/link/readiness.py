"""What would become of a new request, for those who tell it to the world outside."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from paceline_scheduler.holder import Holder
from paceline_scheduler.link.attachment import Attachment


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
