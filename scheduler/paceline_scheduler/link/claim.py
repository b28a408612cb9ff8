"""The claim that this scheduler makes: an id per boot, and a term that only rises, alike at all credible executors.

Knows how far an executor is believed about terms. Refuses to know streams and time.
"""

from collections.abc import Mapping

from paceline.plan.values import MAX_TERM, Approach, Claim, ExecutorInfo, Hello
from paceline.plan.versions import PROTOCOLS, ProtocolRange
from paceline_scheduler.errors import IncredibleTermError

# By so much one executor alone may lift the term: the next scheduler has to rise above it.
MAX_RISE = 2**32


class OwnClaim:
    """A takeover happens once per executor, and stops when another scheduler has answered in kind: two would take an
    executor from each other for ever.
    """

    def __init__(
        self, scheduler_id: str, approach: Approach = Approach.WAIT, protocols: ProtocolRange = PROTOCOLS
    ) -> None:
        self.scheduler_id = scheduler_id
        self.term = 1
        self.address = ""
        self._approach = approach
        self._protocols = protocols
        self._greeted: dict[str, None] = {}  # that have had a hello
        self._welcomed_by: dict[int, None] = {}  # since it last stepped down
        self._reported_terms: dict[str, int] = {}  # by address; 0 before

    def look_for(self, address: str) -> None:
        self._reported_terms.setdefault(address, 0)

    def forget(self, address: str) -> None:
        self._reported_terms.pop(address, None)

    def learn(self, terms: Mapping[str, int]) -> None:
        """Call it before the first claim."""
        self._reported_terms.update(terms)
        credible = (term for address, term in terms.items() if self.is_credible(address, term))
        self.term = max(self.term, max(credible, default=0) + 1)

    def hello(self, address: str, info: ExecutorInfo) -> Hello:
        """Above a term that is not credible, which elsewhere changes nothing."""
        takes_over = self.takes_over(address)
        self._greeted[address] = None
        term = self.term if self.is_credible(address, info.term) else info.term + 1
        return Hello(Claim(term, self.scheduler_id, self.address), self._protocols, takes_over)

    def takes_over(self, address: str) -> bool:
        """The next hello to this executor displaces a live holder."""
        return self._approach is Approach.TAKE_OVER and address not in self._greeted

    def must_rise(self, info: ExecutorInfo) -> bool:
        """Nobody holds the executor and its term is above this claim. Above a live holder it rises only by stepping
        down: of two schedulers that start at once one must yield.
        """
        if info.holder_scheduler_id or info.term < self.term:
            return False
        return info.incarnation not in self._welcomed_by

    def rise_above(self, address: str, term: int) -> None:
        """Raises IncredibleTermError."""
        self._reported_terms[address] = term
        self.require_credible(address, term)
        self.term = max(self.term, term + 1)

    def require_free(self, info: ExecutorInfo) -> None:
        """Of a term that is not credible. Raises IncredibleTermError if another holds it, or no term is above."""
        if info.term >= MAX_TERM or info.holder_scheduler_id not in ("", self.scheduler_id):
            raise IncredibleTermError(info.term)

    def require_credible(self, address: str, term: int) -> None:
        """Raises IncredibleTermError."""
        if not self.is_credible(address, term):
            raise IncredibleTermError(term)

    def is_below(self, holder: Claim) -> bool:
        return holder > Claim(self.term, self.scheduler_id)

    def is_welcome(self, incarnation: int) -> None:
        """The term of this executor needs no rise."""
        self._welcomed_by[incarnation] = None

    def step_down(self, address: str, holder: Claim) -> None:
        """It then waits for the executor. Raises IncredibleTermError."""
        self.rise_above(address, max(self.term, holder.term))
        self._approach = Approach.WAIT
        self._welcomed_by.clear()

    def is_credible(self, address: str, term: int) -> bool:
        others = [term for other, term in self._reported_terms.items() if other != address]
        if not others:
            return 0 <= term < MAX_TERM
        return 0 <= term < MAX_TERM and term <= max(self.term, *others) + MAX_RISE


def outranks(holder: Claim, hello: Hello) -> bool:
    """The executor has to refuse the hello."""
    return holder > hello.claim
