"""Who this scheduler is for the executors: an id per boot, a term that only rises, and one stream to each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from paceline.plan.values import PROTOCOLS, Claim, ExecutorInfo, Hello, ProtocolRange
from paceline_scheduler.errors import StreamEndedError, TermSupersededError


class Approach(Enum):
    """How a scheduler comes to executors that another one holds: it stands in line, or takes over from a live holder.

    Taking over is an operator's act: it is done once per executor, and not any more once another scheduler has answered
    in kind. Otherwise two schedulers would take an executor from each other for ever.
    """

    WAIT = "wait"
    TAKE_OVER = "take over"


class Identity:
    """The claim this scheduler makes. It is *acting* from its first welcome until another scheduler displaces it."""

    def __init__(
        self, scheduler_id: str, approach: Approach = Approach.WAIT, protocols: ProtocolRange = PROTOCOLS
    ) -> None:
        self.scheduler_id = scheduler_id
        self.term = 1
        self.is_acting = False
        self.address = ""  # where clients reach this scheduler, once that is known
        self._approach = approach
        self._protocols = protocols
        self._greeted: dict[str, None] = {}  # addresses that have had a hello
        self._welcomed_by: dict[int, None] = {}  # incarnations, since it last stepped down
        self._addresses: dict[int, str] = {}  # of the executors that have a stream, by incarnation

    @contextmanager
    def only_stream_to(self, incarnation: int, address: str) -> Iterator[None]:
        """Be the only stream to an executor; raises StreamEndedError when it has one under another address.

        Two of them would end each other for ever, since a scheduler that attaches again replaces its own stream.
        """
        other = self._addresses.setdefault(incarnation, address)
        if other != address:
            raise StreamEndedError(f"the executor at {address} is the one at {other}")
        try:
            yield
        finally:
            del self._addresses[incarnation]

    def hello(self, address: str) -> Hello:
        """Return the claim as it opens a plan stream to the executor at an address."""
        takes_over = self.takes_over(address)
        self._greeted[address] = None
        return Hello(Claim(self.term, self.scheduler_id, self.address), self._protocols, takes_over)

    def takes_over(self, address: str) -> bool:
        """Whether the next hello to the executor at an address displaces a live holder."""
        return self._approach is Approach.TAKE_OVER and address not in self._greeted

    def learn(self, info: ExecutorInfo) -> None:
        """Rise above the highest term seen, before the first claim is made."""
        self.term = max(self.term, info.term + 1)

    def consider(self, info: ExecutorInfo) -> bool:
        """Rise above the term of an executor that nobody holds; True when that was necessary.

        Then all executors have to be attached to anew: a scheduler has one claim everywhere. Above a holder that is
        alive it rises only by stepping down: of two that start at once, and find each other, one must yield.
        """
        if info.holder_scheduler_id or info.term < self.term or info.incarnation in self._welcomed_by:
            return False
        self.term = info.term + 1
        return True

    def is_welcome(self, incarnation: int) -> None:
        """An executor has accepted this scheduler, which acts from now on."""
        self.is_acting = True
        self._welcomed_by[incarnation] = None

    def step_down(self, refusal: TermSupersededError) -> bool:
        """Rise above a scheduler that refused us and wait behind it; True when we were acting until now."""
        was_acting, self.is_acting, self._approach = self.is_acting, False, Approach.WAIT
        self.term = max(self.term, refusal.holder.term) + 1
        self._welcomed_by.clear()
        return was_acting
