"""What would become of a new request, for those who tell it to the world outside."""

from dataclasses import dataclass
from enum import Enum

from paceline_scheduler.holder import Holder


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


def readiness_of(active: Holder | None, *, is_served: bool) -> Readiness:
    """Return how a scheduler stands that takes requests, if an executor does; `active` is whom they are sent to."""
    if active is not None:
        return Readiness(Standing.STANDING_BY, active)
    return Readiness(Standing.READY if is_served else Standing.UNREADY)
