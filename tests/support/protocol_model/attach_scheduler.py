"""What schedulers do in the attach model: ask for terms, dial, drive, and give up.

Terms are the scheduler's own `link/claim.py`; the rest follows its `leadership` and `executor_link`.
"""

from collections.abc import Iterator

from paceline.plan.values import Claim, ExecutorInfo
from paceline_scheduler.link.claim import OwnClaim
from protocol_model.attach_state import (
    Damage,
    Executor,
    Faults,
    Place,
    Plan,
    Safeguard,
    Scheduler,
    Stream,
    all_closings,
    closings,
    is_overdue,
    with_rest,
    with_stream,
    with_welcome,
)
from protocol_model.checker import Move

_MAX_STREAMS = 2
"""A scheduler dials an executor again when less than so many streams of its slot are still under way there."""


class LinkMoves:
    """The moves of one scheduler that concern one executor, given which safeguards are on.

    `here` is that executor, `there` the other one.
    """

    def __init__(self, slot: int, number: int, safeguards: frozenset[Safeguard]) -> None:
        self._slot = slot
        self._name = f"scheduler {'AB'[slot]}"
        self._executor = f"executor {number}"
        self._safeguards = safeguards

    def look(self, scheduler: Scheduler, here: Executor) -> Iterator[Move]:
        """Just booted: rise above the terms of the executors. The other one may not have answered in time."""
        if not scheduler.term:
            claim = self._claim(scheduler, here)
            claim.learn({self._executor: here.highest_term})
            yield f"{self._name} takes term {claim.term}", (scheduler._replace(term=claim.term), here)

    def dial(self, scheduler: Scheduler, here: Executor) -> Iterator[Move]:
        """Say hello, with the claim it has everywhere."""
        if self._may_dial(scheduler, here) and self._risen_term(scheduler, here) == scheduler.term:
            label = f"{self._name} says hello to {self._executor} with term {scheduler.term}"
            yield label, (scheduler, self._dialled(scheduler, here))

    def must_rise(self, scheduler: Scheduler, here: Executor) -> bool:
        """Whether nobody holds the executor any more and its term is too high for this scheduler's claim."""
        return self._may_dial(scheduler, here) and self._risen_term(scheduler, here) != scheduler.term

    def rise_alone(self, scheduler: Scheduler, here: Executor, there: Executor) -> Iterator[Move]:
        """Say hello with a term above the one before, where no stream says otherwise."""
        if there.open_stream(self._slot) is None or Safeguard.ONE_CLAIM not in self._safeguards:
            risen = scheduler._replace(term=self._risen_term(scheduler, here))
            label = f"{self._name} says hello to {self._executor} with term {risen.term}, a higher one"
            yield label, (risen, self._dialled(risen, here), there)

    def rise_everywhere(self, scheduler: Scheduler, here: Executor, there: Executor, faults: Faults) -> Iterator[Move]:
        """Take the higher term, and attach to the other executor anew."""
        if there.open_stream(self._slot) is not None and Safeguard.ONE_CLAIM in self._safeguards:
            risen = scheduler._replace(term=self._risen_term(scheduler, here))
            label = f"{self._name} takes term {risen.term} because of {self._executor} and attaches anew"
            for closed, left in closings(there, self._slot, faults):
                yield label, (risen, here, closed, left)

    def rise_hastily(self, scheduler: Scheduler, here: Executor, there: Executor, faults: Faults) -> Iterator[Move]:
        """Do so before others had their chance."""
        if faults.haste:
            left = faults._replace(haste=faults.haste - 1)
            for label, parts in self.rise_everywhere(scheduler, here, there, left):
                yield f"{label}, at once", parts

    def drive(self, here: Executor) -> Iterator[Move]:
        """Take a welcome, and send plans."""
        stream = here.open_stream(self._slot)
        if stream is None:
            return
        if stream.welcome:
            driven = with_stream(here, stream, stream._replace(welcome=0, epoch=stream.welcome))
            is_known = stream.damage is not Damage.RESTARTED
            label = f"{self._name} drives {self._executor} in epoch {stream.welcome}"
            yield label, (with_welcome(driven, self._slot, is_known=is_known),)
        if stream.epoch and stream.num_sent < here.max_plans and stream.damage is Damage.NONE:
            plan = Plan(here.incarnation, stream.epoch, stream.num_sent + 1, stream.scheduler_id)
            sent = stream._replace(num_sent=plan.step_id, plans=(*stream.plans, plan))
            label = f"{self._name} sends plan {plan.step_id} of epoch {plan.epoch}"
            yield label, (with_stream(here, stream, sent),)

    def sees_end(self, here: Executor) -> bool:
        """Whether the stream has ended for the scheduler, or it ends it because a result is overdue."""
        stream = here.open_stream(self._slot)
        if stream is None:
            return False
        return stream.place is Place.ENDED or stream.damage is not Damage.NONE or is_overdue(here, stream)

    def see_end(self, scheduler: Scheduler, here: Executor, there: Executor, faults: Faults) -> Iterator[Move]:
        """The stream ended: dial again later, or give everything up."""
        stream = here.open_stream(self._slot)
        assert stream is not None, "there is a stream that ends"
        if stream.holder_term and stream.damage is Damage.NONE:
            yield from self._step_down(scheduler, (here, there), faults, stream.holder_term)
            return
        for closed, left in closings(here, self._slot, faults):
            yield f"{self._name} sees its stream to {self._executor} end", (scheduler, closed, there, left)

    def is_resting(self, here: Executor) -> bool:
        """Whether the scheduler was refused, and has not dialled again since."""
        return here.resting[self._slot]

    def rest(self, here: Executor, there: Executor) -> Iterator[Move]:
        """It has let others have their chance: it dials again all that it let go."""
        rested = (with_rest(executor, self._slot, is_resting=False) for executor in (here, there))
        yield f"{self._name} has rested", tuple(rested)

    def rest_too_little(self, here: Executor, faults: Faults) -> Iterator[Move]:
        """It dials again before others had their chance."""
        if faults.haste:
            hasty = with_rest(here, self._slot, is_resting=False)
            label = f"{self._name} comes back to {self._executor} too soon"
            yield label, (hasty, faults._replace(haste=faults.haste - 1))

    def crash(self, scheduler: Scheduler, here: Executor, there: Executor, faults: Faults) -> Iterator[Move]:
        """It dies. Ids are random: successors of A have the lowest of all, those of B the highest."""
        successor = Scheduler(scheduler.scheduler_id + (1 if self._slot else -1))
        label = f"{self._name} dies and comes back with id {successor.scheduler_id}"
        left = faults._replace(crashes=faults.crashes - 1)
        for first, second, rest in all_closings(here, there, self._slot, left):
            gone = (self._let_go(executor, is_resting=False) for executor in (first, second))
            yield label, (successor, *gone, rest)

    def _may_dial(self, scheduler: Scheduler, here: Executor) -> bool:
        num_streams = sum(stream.slot == self._slot for stream in here.streams)
        is_free = here.open_stream(self._slot) is None and num_streams < _MAX_STREAMS
        return bool(scheduler.term) and is_free and not here.resting[self._slot]

    def _risen_term(self, scheduler: Scheduler, here: Executor) -> int:
        claim = self._claim(scheduler, here)
        holder = _id(here.holder.scheduler_id) if here.holder is not None else ""
        if claim.must_rise(ExecutorInfo(here.incarnation, here.highest_term, holder)):
            claim.rise_above(self._executor, here.highest_term)
        return claim.term

    def _claim(self, scheduler: Scheduler, here: Executor) -> OwnClaim:
        """Return the claim as the scheduler makes it, and as it remembers the executor."""
        claim = OwnClaim(_id(scheduler.scheduler_id))
        claim.term = scheduler.term
        if here.known[self._slot]:
            claim.is_welcome(here.incarnation)
        return claim

    def _dialled(self, scheduler: Scheduler, here: Executor) -> Executor:
        return with_stream(here, None, Stream(self._slot, scheduler.scheduler_id, scheduler.term))

    def _step_down(
        self, scheduler: Scheduler, executors: tuple[Executor, Executor], faults: Faults, holder_term: int
    ) -> Iterator[Move]:
        here, there = executors
        claim = self._claim(scheduler, here)
        claim.step_down(self._executor, Claim(holder_term, ""))
        risen = scheduler._replace(term=claim.term)
        label = f"{self._name} is refused by {self._executor}, whose holder has term {holder_term}"
        if Safeguard.STANDING_DOWN not in self._safeguards:
            for closed, left in closings(here, self._slot, faults):
                yield label, (risen, self._let_go(closed, is_resting=True), there, left)
            return
        for first, second, left in all_closings(here, there, self._slot, faults):
            let_go = (self._let_go(executor, is_resting=True) for executor in (first, second))
            yield f"{label}, and gives up all", (risen, *let_go, left)

    def _let_go(self, executor: Executor, *, is_resting: bool) -> Executor:
        return with_welcome(with_rest(executor, self._slot, is_resting=is_resting), self._slot, is_known=False)


def _id(number: int) -> str:
    """Return a scheduler's id, which compares as its number does."""
    return f"{number + 100:03}"
