"""What would become of a new request, for those who tell it to the world outside."""

from paceline_scheduler.holder import Holder
from paceline_scheduler.link.leadership import Readiness as Readiness
from paceline_scheduler.link.leadership import Standing as Standing


def readiness_of(active: Holder | None, *, is_served: bool) -> Readiness:
    """Return how a scheduler stands that takes requests, if an executor does; `active` is whom they are sent to."""
    if active is not None:
        return Readiness(Standing.STANDING_BY, active)
    return Readiness(Standing.READY if is_served else Standing.UNREADY)
