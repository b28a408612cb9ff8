"""What is known of one executor that is looked for."""

from dataclasses import dataclass, field
from enum import Enum

from paceline.plan.values import Claim, Hello
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.errors import StreamEndedError
from paceline_scheduler.link.redial import Redial

LOST_AFTER_S = 1.5
FIRST_REST_S = 5.0
MAX_REST_S = 600.0
_NEVER_S = float("-inf")


class LinkPhase(Enum):
    SOUGHT = "nothing is known of it yet, or not any more"
    IN_LINE = "another scheduler drives it, and this one waits"
    DRIVEN = "this scheduler drives it"
    DETACHED = "its stream has ended a moment ago, and its requests wait for it"
    YIELDED = "it was left to another scheduler, which took over, and nothing is known of it since"
    LOST = "it is gone as far as can be told"


@dataclass(slots=True)
class ExecutorRecord:
    address: str
    phase: LinkPhase = LinkPhase.SOUGHT
    is_awaited: bool = False
    holder: Claim | None = None  # another scheduler that drives it
    lost_at_s: float | None = None
    incarnation: int = 0
    hello: Hello | None = None
    in_line_at: int | None = None  # where it queued last, unless accepted since
    left_alone_until_s: float = _NEVER_S
    is_syncing: bool = False  # accepted us, and we still lack something
    is_drain_due: bool = False  # its notice came before it was ours
    claims_count_from_s: float = _NEVER_S  # before that its word changes nothing elsewhere
    rest_s: float = FIRST_REST_S
    redial: Redial = field(default_factory=Redial)

    @property
    def is_serving(self) -> bool:
        """Its requests may go on there, also if the stream broke a moment ago."""
        return self.phase in (LinkPhase.DRIVEN, LinkPhase.DETACHED)

    def greet(self, incarnation: int, hello: Hello) -> None:
        self.incarnation, self.hello, self.is_drain_due = incarnation, hello, False

    def seek(self, lost_at_s: float | None) -> None:
        """Without news it is lost then."""
        self.phase, self.lost_at_s = LinkPhase.SOUGHT, lost_at_s

    def leave(self) -> None:
        self.phase, self.lost_at_s = LinkPhase.YIELDED, None

    def stand_in_line(self, holder: Claim) -> None:
        self.phase, self.holder, self.lost_at_s = LinkPhase.IN_LINE, holder, None
        self.in_line_at = self.incarnation
        self.redial.reset()

    def sync(self) -> None:
        self.is_syncing = True
        if self.phase is LinkPhase.IN_LINE:
            self.phase = LinkPhase.SOUGHT

    def welcome(self, description: ExecutorDescription, now_s: float) -> None:
        self.incarnation = description.incarnation
        self.phase, self.holder, self.lost_at_s = LinkPhase.DRIVEN, None, None
        self.is_awaited, self.is_syncing, self.in_line_at = False, False, None
        self.claims_count_from_s, self.rest_s = _NEVER_S, FIRST_REST_S
        self.redial.welcomed(description, now_s)

    def detach(self, holder: Claim | None, now_s: float) -> bool:
        """`holder` may be the reason; returns whether it was driven."""
        was_driven = self.redial.ended(now_s)
        if self.phase is LinkPhase.DRIVEN:
            self.phase = LinkPhase.DETACHED
        elif self.phase is LinkPhase.IN_LINE:
            self.phase = LinkPhase.SOUGHT
        self.hello, self.holder, self.is_syncing = None, holder, False
        if self.phase is not LinkPhase.LOST and self.lost_at_s is None:
            self.lost_at_s = now_s + LOST_AFTER_S
        return was_driven

    def lose(self) -> None:
        self.phase, self.lost_at_s, self.holder = LinkPhase.LOST, None, None
        self.is_awaited = self.is_syncing = False

    def let_claim_count(self, now_s: float) -> None:
        """Made-up claims would cost the others everything: the next one counts later. Raises StreamEndedError."""
        if now_s < self.claims_count_from_s:
            raise StreamEndedError(
                "it reports a higher term again, which no other executor confirms; this scheduler tries again later"
            )
        self.claims_count_from_s = now_s + self.rest_s
        self.rest_s = min(2 * self.rest_s, MAX_REST_S)
