"""Who may drive a simulated executor: the rule of the plan protocol, written apart from the executor's own fence.

Knows claims, streams by number and the time it is told, in seconds. Refuses to know messages, steps and rows: a call
returns what becomes of which stream, and its caller lets that happen. Each part of the rule is a method of its own, so
that a simulation can replace it and look what then goes wrong.
"""

from dataclasses import dataclass
from enum import Enum

from paceline.plan.values import Claim

LEASE_S = 1.0
RETURN_S = 0.05
MAX_WAITING = 16


NOBODY = Claim(0, "")


class Approach(Enum):
    """Whether a scheduler stands in line, or displaces a live holder of a lower claim."""

    WAIT = "wait"
    TAKE_OVER = "take over"


class Standing(Enum):
    """What becomes of a stream."""

    DRIVES = "drives from now on"
    WAITS = "stands in line"
    DISPLACED = "drove, and ends: another stream was accepted"
    SUPERSEDED = "ends: a higher claim was accepted"
    REPLACED = "ends in line: its own scheduler was accepted on another stream"
    TURNED_AWAY = "ends: the line is full"


@dataclass(frozen=True, slots=True)
class Ruling:
    """A stream and what becomes of it."""

    stream_id: int
    standing: Standing


@dataclass(slots=True)
class _Visitor:
    claim: Claim
    heard_s: float


class Fence:
    """Rules who drives. `claim` is the one accepted last and never falls; `epoch` counts acceptances."""

    def __init__(self, lease_s: float = LEASE_S, return_s: float = RETURN_S, max_waiting: int = MAX_WAITING) -> None:
        self.claim = NOBODY
        self.driver_id: int | None = None  # the stream that drives
        self.highest_term = 0
        self.epoch = 0
        self._lease_s = lease_s
        self._return_s = return_s
        self._max_waiting = max_waiting
        self._visitors: dict[int, _Visitor] = {}  # all open streams: the one that drives and those in line
        self._ended_s = 0.0  # when the last driver's stream ended

    @property
    def num_waiting(self) -> int:
        """How many streams stand in line."""
        return len(self._visitors) - (self.driver_id is not None)

    def arrive(self, stream_id: int, claim: Claim, approach: Approach, now_s: float) -> tuple[Ruling, ...]:
        """A stream says who it is."""
        if self.is_superseded(claim):
            return (Ruling(stream_id, Standing.SUPERSEDED),)
        self._visitors[stream_id] = _Visitor(claim, now_s)
        if self.goes_first(claim, approach):
            return self._let_drive(stream_id)
        rulings = self.look(now_s)
        if not rulings and self.num_waiting > self._max_waiting:
            del self._visitors[stream_id]
            return (Ruling(stream_id, Standing.TURNED_AWAY),)
        self.highest_term = max(self.highest_term, claim.term)
        return rulings or (Ruling(stream_id, Standing.WAITS),)

    def hear(self, stream_id: int, now_s: float) -> tuple[Ruling, ...]:
        """A stream said something."""
        if stream_id in self._visitors:
            self._visitors[stream_id].heard_s = now_s
        return self.look(now_s)

    def leave(self, stream_id: int, now_s: float) -> tuple[Ruling, ...]:
        """A stream has ended, whoever ended it."""
        self._visitors.pop(stream_id, None)
        if stream_id == self.driver_id:
            self.driver_id, self._ended_s = None, now_s
        return self.look(now_s)

    def look(self, now_s: float) -> tuple[Ruling, ...]:
        """Time has passed: give a free executor to the highest in line that is not silent."""
        heirs = [
            (visitor.claim, stream_id)
            for stream_id, visitor in self._visitors.items()
            if stream_id != self.driver_id and not self.is_silent(stream_id, now_s)
        ]
        if not heirs or not self.is_free(now_s):
            return ()
        highest = max(claim for claim, _ in heirs)
        return self._let_drive(next(stream_id for claim, stream_id in heirs if claim == highest))

    def next_change_s(self) -> float | None:
        """When time alone would free the executor; None while nobody stands in line."""
        if not self.num_waiting:
            return None
        if self.driver_id is not None:
            return self._visitors[self.driver_id].heard_s + self._lease_s
        return self._ended_s + self._return_s

    def renew(self, now_s: float) -> None:
        """The executor itself stood still: what it did not hear meanwhile may well have been said."""
        for visitor in self._visitors.values():
            visitor.heard_s = now_s

    # The rule, part by part

    def is_superseded(self, claim: Claim) -> bool:
        """Whether a claim comes too late, whether anybody drives now or not."""
        return claim < self.claim

    def goes_first(self, claim: Claim, approach: Approach) -> bool:
        """Whether a claim that is not superseded need not stand in line."""
        is_return = claim.scheduler_id == self.claim.scheduler_id
        return self.claim == NOBODY or is_return or approach is Approach.TAKE_OVER

    def is_free(self, now_s: float) -> bool:
        """Whether the one that drove last has lost its right to come first."""
        if self.driver_id is not None:
            return self.is_silent(self.driver_id, now_s)
        return now_s - self._ended_s >= self._return_s

    def is_silent(self, stream_id: int, now_s: float) -> bool:
        """Whether a stream has said nothing for the lease."""
        return now_s - self._visitors[stream_id].heard_s >= self._lease_s

    def _let_drive(self, stream_id: int) -> tuple[Ruling, ...]:
        displaced, self.driver_id = self.driver_id, stream_id
        self.claim = self._visitors[stream_id].claim
        self.highest_term = max(self.highest_term, self.claim.term)
        self.epoch += 1
        rulings = [Ruling(stream_id, Standing.DRIVES)]
        if displaced is not None:
            del self._visitors[displaced]
            rulings.insert(0, Ruling(displaced, Standing.DISPLACED))
        return (*rulings, *self._look_along_the_line())

    def _look_along_the_line(self) -> list[Ruling]:
        rulings: list[Ruling] = []
        for stream_id, visitor in list(self._visitors.items()):
            if stream_id == self.driver_id:
                continue
            standing = Standing.WAITS
            if visitor.claim <= self.claim:
                is_own = visitor.claim.scheduler_id == self.claim.scheduler_id
                standing = Standing.REPLACED if is_own else Standing.SUPERSEDED
                del self._visitors[stream_id]
            rulings.append(Ruling(stream_id, standing))
        return rulings
