"""The bounds model: what a scheduler plans of one row whose steps verify drafts, and what results make of it.

Positions are numbers here and tokens are not: a plan covers a token and its drafts, a result says how many tokens came.
Invariants: what is planned of the row is never below what its executor has computed, and equal to it when no plan is in
flight; no step computes beyond the row's last token or its blocks; no block is granted that the row could do without.
In the end the row ends, and the scheduler knows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from protocol_model.checker import Kind, Model, Move, Rule

_SCHEDULER, _EXECUTOR, _CUTS = range(3)
_BLOCK_SIZE = 2
_MAX_IN_FLIGHT = 3


class Safeguard(Enum):
    """What can be switched off."""

    SURPLUS = "a result lowers what is planned of its row by what it does not bring"
    SURPLUS_BEHIND = "it lowers that of the steps behind it too"
    CLIPPING = "no position is planned beyond the last token, should all drafts be right"
    SPARE_BLOCKS = "what refused drafts leave of a block serves the next tokens"


ALL_SAFEGUARDS = frozenset(Safeguard)


class Plan(NamedTuple):
    """A step, on its way to the executor: positions, and how many blocks the row has from it on."""

    num_scheduled: int
    num_blocks: int


class Result(NamedTuple):
    """What came of it."""

    num_accepted: int
    is_end: bool


class Scheduler(NamedTuple):
    """The row as the scheduler has it. `in_flight`: up to where each step was planned, at most."""

    bound: int = 1
    num_computed: int = 1
    in_flight: tuple[int, ...] = ()
    num_blocks: int = 1
    is_over: bool = False
    broken: str = ""


class Executor(NamedTuple):
    """The row on its executor, and what is under way."""

    num_computed: int = 1
    plans: tuple[Plan, ...] = ()
    results: tuple[Result, ...] = ()
    num_blocks: int = 1
    is_over: bool = False
    broken: str = ""


@dataclass(frozen=True, slots=True)
class _Moves:
    """What may happen to a row that computes `limit` positions, with so many drafts in a step at most."""

    limit: int
    max_drafts: int
    safeguards: frozenset[Safeguard]

    def plan(self, scheduler: Scheduler, executor: Executor) -> Iterator[Move]:
        """Another step is planned, whatever those in flight bring."""
        if scheduler.is_over or len(scheduler.in_flight) == _MAX_IN_FLIGHT or scheduler.bound >= self.limit:
            return
        room = self.limit - scheduler.bound if Safeguard.CLIPPING in self.safeguards else self.limit
        for num_scheduled in range(1, min(1 + self.max_drafts, room) + 1):
            bound = scheduler.bound + num_scheduled
            num_blocks = max(scheduler.num_blocks, -(-bound // _BLOCK_SIZE))
            planned = scheduler._replace(bound=bound, in_flight=(*scheduler.in_flight, bound), num_blocks=num_blocks)
            plans = (*executor.plans, Plan(num_scheduled, num_blocks))
            yield f"a step of {num_scheduled} is planned", (planned, executor._replace(plans=plans))

    def run(self, executor: Executor) -> Iterator[Move]:
        """The executor runs its next step: any number of tokens comes of it, and any of them may be the end."""
        if not executor.plans:
            return
        plan, plans = executor.plans[0], executor.plans[1:]
        before = executor._replace(plans=plans, num_blocks=plan.num_blocks)
        if executor.is_over:
            yield "a step finds the row ended", (before._replace(results=(*executor.results, Result(0, False))),)
            return
        end = executor.num_computed + plan.num_scheduled
        if end > self.limit:
            yield "a step runs", (before._replace(broken="a step computes beyond the last token"),)
        if end > plan.num_blocks * _BLOCK_SIZE:
            yield "a step runs", (before._replace(broken="a step writes beyond the row's blocks"),)
        for num_accepted in range(plan.num_scheduled + 1):
            computed = executor.num_computed + num_accepted
            for is_end in {computed == self.limit, num_accepted > 0}:
                results = (*executor.results, Result(num_accepted, is_end))
                after = before._replace(num_computed=computed, results=results, is_over=is_end)
                yield f"a step brings {num_accepted} tokens{' and the end' * is_end}", (after,)

    def land(self, scheduler: Scheduler, executor: Executor) -> Iterator[Move]:
        """The oldest result arrives."""
        if not executor.results:
            return
        result, heard = executor.results[0], executor._replace(results=executor.results[1:])
        after, behind = scheduler.in_flight[0], scheduler.in_flight[1:]
        if scheduler.is_over:
            yield "the result of an ended row arrives", (scheduler._replace(in_flight=behind), heard)
            return
        surplus = after - scheduler.num_computed - result.num_accepted
        landed = scheduler._replace(
            num_computed=after - surplus,
            is_over=result.is_end,
            broken="more tokens came than were planned" if surplus < 0 else "",
            bound=scheduler.bound - surplus * (Safeguard.SURPLUS in self.safeguards),
            in_flight=tuple(step - surplus * (Safeguard.SURPLUS_BEHIND in self.safeguards) for step in behind),
        )
        if Safeguard.SPARE_BLOCKS not in self.safeguards:
            landed = landed._replace(num_blocks=landed.num_blocks + (surplus > 0))
        yield "a result arrives", (landed, heard)


def _cut(_: Scheduler, executor: Executor, num_cuts: int) -> Iterator[Move]:
    """The stream breaks and is opened again: the executor's snapshot is the truth, what was under way is gone."""
    if num_cuts:
        seen = Scheduler(executor.num_computed, executor.num_computed, (), executor.num_blocks, executor.is_over)
        yield "the stream breaks and is opened again", (seen, executor._replace(plans=(), results=()), num_cuts - 1)


def bounds_model(
    limit: int, max_drafts: int, num_cuts: int, safeguards: frozenset[Safeguard] = ALL_SAFEGUARDS
) -> Model:
    """Return the model of a row that computes `limit` positions, the first of them already."""
    moves = _Moves(limit, max_drafts, safeguards)
    most_blocks = -(-limit // _BLOCK_SIZE)

    def violation(scheduler: Scheduler, executor: Executor, _: int) -> str:
        if scheduler.broken or executor.broken:
            return scheduler.broken or executor.broken
        if scheduler.num_blocks > most_blocks:
            return "the row has more blocks than it can fill"
        if scheduler.num_computed > executor.num_computed or scheduler.bound < executor.num_computed:
            return "the truth is not between what is confirmed and what is planned"
        is_still = not (scheduler.in_flight or scheduler.is_over)
        return (
            "nothing is in flight, and what is planned is not the truth"
            if (is_still and scheduler.bound != executor.num_computed)
            else ""
        )

    rules = (
        Rule(Kind.STEP, (_SCHEDULER, _EXECUTOR), moves.plan),
        Rule(Kind.STEP, (_EXECUTOR,), moves.run),
        Rule(Kind.STEP, (_SCHEDULER, _EXECUTOR), moves.land),
        Rule(Kind.FAULT, (_SCHEDULER, _EXECUTOR, _CUTS), _cut),
    )
    return Model((Scheduler(), Executor(), num_cuts), rules, violation, _is_settled)


def _is_settled(scheduler: Scheduler, executor: Executor, _: int) -> bool:
    return scheduler.is_over and executor.is_over and not scheduler.in_flight
