"""The claim that this scheduler makes at every executor alike: an id per boot, and a term that only rises.

Knows terms, and how far an executor is believed about them. Refuses to know streams, time and what follows.
"""

from collections.abc import Mapping
from enum import Enum

from paceline.plan.values import MAX_TERM, Claim, ExecutorInfo, Hello
from paceline.plan.versions import PROTOCOLS, ProtocolRange
from paceline_scheduler.errors import IncredibleTermError
from paceline_scheduler.holder import Holder

# By so much at most one executor alone lifts the term that all the others will see: what it makes up would be the truth
# for the next scheduler, which has to rise above it.
MAX_RISE = 2**32


class Approach(Enum):
    """How a scheduler comes to executors that another one holds: it waits in line, or takes over from a live holder.

    Taking over is an operator's act. It happens once per executor, and stops when another scheduler has answered in
    kind: two schedulers would take an executor from each other for ever.
    """

    WAIT = "wait"
    TAKE_OVER = "take over"


class OwnClaim:
    """Who this scheduler is for the executors, and which of their terms are above its own."""

    def __init__(
        self, scheduler_id: str, approach: Approach = Approach.WAIT, protocols: ProtocolRange = PROTOCOLS
    ) -> None:
        self.scheduler_id = scheduler_id
        self.term = 1
        self.address = ""  # where clients reach this scheduler, once that is known
        self._approach = approach
        self._protocols = protocols
        self._greeted: dict[str, None] = {}  # addresses that have had a hello
        self._welcomed_by: dict[int, None] = {}  # incarnations, since it last stepped down
        self._reported_terms: dict[str, int] = {}  # the last one that each executor told, 0 before; by address

    def look_for(self, address: str) -> None:
        self._reported_terms.setdefault(address, 0)

    def forget(self, address: str) -> None:
        self._reported_terms.pop(address, None)

    def learn(self, terms: Mapping[str, int]) -> None:
        """Rise above all credible terms before the first claim is made."""
        self._reported_terms.update(terms)
        credible = (term for address, term in terms.items() if self._is_credible(address, term))
        self.term = max(self.term, max(credible, default=0) + 1)

    def hello(self, address: str) -> Hello:
        """Return the claim for a plan stream to this executor."""
        takes_over = self.takes_over(address)
        self._greeted[address] = None
        return Hello(Claim(self.term, self.scheduler_id, self.address), self._protocols, takes_over)

    def takes_over(self, address: str) -> bool:
        """Whether the next hello to this executor displaces a live holder."""
        return self._approach is Approach.TAKE_OVER and address not in self._greeted

    def must_rise(self, info: ExecutorInfo) -> bool:
        """Whether nobody holds the executor and its term is above this claim. Above a live holder it rises only by
        stepping down: of two schedulers that start at once one must yield.
        """
        if info.holder_scheduler_id or info.term < self.term:
            return False
        return info.incarnation not in self._welcomed_by

    def rise_above(self, address: str, term: int) -> None:
        """Claim more than an executor reports. Raises IncredibleTermError."""
        self._reported_terms[address] = term
        self.require_credible(address, term)
        self.term = max(self.term, term + 1)

    def require_credible(self, address: str, term: int) -> None:
        """Raise IncredibleTermError for a term that no scheduler can have reached."""
        if not self._is_credible(address, term):
            raise IncredibleTermError(term)

    def is_below(self, holder: Holder) -> bool:
        """Whether a holder's claim is above this one."""
        return (holder.term, holder.scheduler_id) > (self.term, self.scheduler_id)

    def is_welcome(self, incarnation: int) -> None:
        """An executor has accepted this scheduler, so its term needs no rise."""
        self._welcomed_by[incarnation] = None

    def step_down(self, address: str, holder: Holder) -> None:
        """Rise above a holder, to wait for its executor. Raises IncredibleTermError."""
        self.rise_above(address, max(self.term, holder.term))
        self._approach = Approach.WAIT
        self._welcomed_by.clear()

    def _is_credible(self, address: str, term: int) -> bool:
        others = [term for other, term in self._reported_terms.items() if other != address]
        if not others:
            return 0 <= term < MAX_TERM
        return 0 <= term < MAX_TERM and term <= max(self.term, *others) + MAX_RISE


def outranks(holder: Holder, hello: Hello) -> bool:
    """Whether an executor that its holder drives has to refuse a hello."""
    return (holder.term, holder.scheduler_id) > (hello.claim.term, hello.claim.scheduler_id)
