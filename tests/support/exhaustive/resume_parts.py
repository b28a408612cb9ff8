"""What the resume world consists of: the client, schedulers, executors, and the calls and streams between them."""

from dataclasses import dataclass, field
from enum import Enum

from both_sides.audited import AuditedExecutor
from exhaustive.clockwork import Do
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from scheduler_rig.requests import make_request

LENGTH = 3
REQUEST = make_request([5], LENGTH, handle=1, request_id="r", seed=3, is_resumable=True)


class End(Enum):
    """What the client has got."""

    WHOLE = "all its tokens"
    CANCELLED = "what it wanted: it cancelled"
    REFUSED = "a refusal, since nobody has the tokens that it does not send"


@dataclass(frozen=True, slots=True)
class World:
    """What is given: how many schedulers, whether executors compute the same tokens, whether clients send theirs."""

    num_schedulers: int = 1
    is_reproducible: bool = True
    has_prior: bool = True
    is_aftermath: bool = False
    """The scheduler has died that had taken executor 1 for lost, and both executors have a row of the request."""


@dataclass(eq=False)
class Call:
    """The request as the client sent it once."""

    scheduler: "Scheduler"
    process: int
    handle: int
    is_open: bool = True  # at the client's end
    is_served: bool = True  # at the scheduler's


@dataclass(eq=False)
class Link:
    """A plan stream."""

    scheduler: "Scheduler"
    process: int
    address: str
    is_open: bool = True

    @property
    def is_of_now(self) -> bool:
        """It is the scheduler's stream to this executor."""
        return self.scheduler.process == self.process and self.scheduler.links.get(self.address) is self


class Scheduler:
    """A host where one scheduler process comes after another."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = 0
        self.begin()

    def begin(self) -> None:
        """Start a process, which knows nothing."""
        self.process += 1
        self.core = Core(CoreLimits())
        self.links: dict[str, Link] = {}
        self.calls: dict[int, Call] = {}  # that are answered, by handle
        self.opened: list[Call] = []  # also those that wait
        self.waiting: list[Do] = []  # until it is known what all executors run
        self.is_standby = False

    @property
    def live(self) -> LiveRequest | None:
        """The request, as long as it is open."""
        requests = self.core.state.requests
        live = requests.by_key(REQUEST.key)
        return live if live is not None and requests.is_open(live) else None


@dataclass(eq=False)
class Host:
    """An executor, and the plan stream that it was reached by last."""

    address: str
    executor: AuditedExecutor
    link: Link | None = None
    is_running: bool = False

    def drop_waiting(self) -> None:
        self.executor.drop_waiting(int(self.is_running))


@dataclass(eq=False)
class Client:
    """The client library, which does all it can to get its request done."""

    held: list[int] = field(default_factory=list)
    attachment: int = 0
    last_attempt: int = 0
    call: Call | None = None
    end: End | None = None
    wants_none: bool = False
