"""The resume model: what a client gets of its request, after crashes, broken streams, lost executors and cancels.

Invariants: every token the client is told was computed from exactly the tokens it holds, so nothing is lost, doubled or
changed; tokens are added to a request only if they were computed from what it has; a row is placed where there is none;
of two rows that fit the higher attempt lives; the newest attachment never gives way; a client that does not send its
tokens is refused only if something was lost. In the end the client has its tokens, or its refusal, and no row is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from protocol_model.checker import Kind, Model, Rule
from protocol_model.resume_answers import AnswerMoves
from protocol_model.resume_client import ClientMoves, Talk, cut
from protocol_model.resume_executor import ExecutorMoves, befall
from protocol_model.resume_scheduler import SchedulerMoves
from protocol_model.resume_state import (
    LENGTH,
    Client,
    Delta,
    Ending,
    Executor,
    Faults,
    Phase,
    Row,
    Safeguard,
    Scheduler,
    Stream,
)

ALL_SAFEGUARDS = frozenset(Safeguard)
_CLIENT, _FIRST, _SECOND, _FAULTS, _TALK_A, _A, _TALK_B, _B = range(8)
_OTHER = {_A: _B, _B: _A}


class Start(Enum):
    """Where the model begins."""

    FRESH = "nothing has been sent yet"
    AFTERMATH = "a scheduler has just died that had given up executor 1 for lost and gone on with executor 2"


@dataclass(frozen=True, slots=True)
class World:
    """What is given: how many schedulers, whether executors compute the same tokens, whether clients send theirs."""

    num_schedulers: int = 1
    is_reproducible: bool = True
    has_prior: bool = True
    start: Start = Start.FRESH


def resume_model(world: World, faults: Faults, safeguards: frozenset[Safeguard] = ALL_SAFEGUARDS) -> Model:
    """Return the model in which so much may happen."""
    executors = ExecutorMoves(safeguards, is_reproducible=world.is_reproducible)
    rules: list[Rule] = []
    for place in (_FIRST, _SECOND):
        rules.append(Rule(Kind.STEP, (place,), executors.carry_out))
        rules.append(Rule(Kind.FAULT, (place, _FAULTS), befall))
    for slot in range(world.num_schedulers):
        talk, scheduler = ((_TALK_A, _A), (_TALK_B, _B))[slot]
        moves = SchedulerMoves(slot, safeguards)
        answers = AnswerMoves(slot, safeguards, has_prior=world.has_prior)
        rules += _rules_of_clients(ClientMoves(slot), answers, talk, scheduler)
        rules.append(Rule(Kind.FAULT, (talk, scheduler, _FAULTS), moves.crash))
        for place in (_FIRST, _SECOND):
            rules += _rules_of_executors(moves, talk, scheduler, place)
        if world.num_schedulers > 1:
            rules += _rules_of_displacement(moves, talk, scheduler, _OTHER[scheduler])
    client, first, second, talk_a, scheduler_a = _beginning(world)
    parts = (client, first, second, faults, talk_a, scheduler_a, (), Scheduler(is_resting=True))
    return Model(parts[: 4 + 2 * world.num_schedulers], tuple(rules), _violation, _is_settled)


def _beginning(world: World) -> tuple[Client, Executor, Executor, Talk, Scheduler]:
    if world.start is Start.FRESH:
        return Client(), Executor(0), Executor(1), (), Scheduler()
    salts = (0, 0) if world.is_reproducible else (2, 3)
    left = Stream(1, None, (Delta((), salts[1], 2),), Ending.UNAVAILABLE)
    first = Executor(0, driver=(0, 1), row=Row(1, (salts[0], salts[0])))
    second = Executor(1, driver=(0, 1), row=Row(2, (salts[1],)))
    return Client(attachment=1, slot=0), first, second, (left,), Scheduler(boot=2)


def _rules_of_clients(client: ClientMoves, answers: AnswerMoves, talk: int, scheduler: int) -> Iterator[Rule]:
    yield Rule(Kind.STEP, (_CLIENT, talk, scheduler), client.attach)
    yield Rule(Kind.STEP, (_CLIENT, talk, _FAULTS), client.listen)
    yield Rule(Kind.FAULT, (_CLIENT, talk, _FAULTS), client.leave)
    yield Rule(Kind.FAULT, (talk, _FAULTS), cut)
    yield Rule(Kind.STEP, (talk, scheduler), answers.answer)
    yield Rule(Kind.STEP, (_CLIENT, talk, scheduler), answers.cancel)
    yield Rule(Kind.SLOW_STEP, (scheduler,), answers.abandon)
    yield Rule(Kind.FAULT, (scheduler, _FAULTS), answers.abandon_early)


def _rules_of_executors(moves: SchedulerMoves, talk: int, scheduler: int, place: int) -> Iterator[Rule]:
    yield Rule(Kind.STEP, (talk, scheduler, place), moves.attach)
    yield Rule(Kind.STEP, (scheduler, place), moves.plan)
    yield Rule(Kind.STEP, (talk, scheduler, place), moves.apply)
    yield Rule(Kind.FAULT, (scheduler, place, _FAULTS), moves.preempt)
    yield Rule(Kind.FAULT, (scheduler, place, _FAULTS), moves.lose)


def _rules_of_displacement(moves: SchedulerMoves, talk: int, scheduler: int, other: int) -> Iterator[Rule]:
    yield Rule(Kind.SLOW_STEP, (scheduler,), moves.rest)
    for place in (_FIRST, _SECOND):
        yield Rule(Kind.STEP, (talk, scheduler, place, other), moves.attach_after)
        yield Rule(Kind.STEP, (talk, scheduler, place, other), moves.yield_up)
        yield Rule(Kind.FAULT, (talk, scheduler, place, _FAULTS), moves.displace)


def _violation(client: Client, first: Executor, second: Executor, faults: Faults, *rest: Talk | Scheduler) -> str:  # noqa: ARG001
    schedulers = [part for part in rest if isinstance(part, Scheduler)]
    return client.broken or first.broken or second.broken or "".join(each.broken for each in schedulers)


def _is_settled(client: Client, first: Executor, second: Executor, faults: Faults, *rest: Talk | Scheduler) -> bool:  # noqa: ARG001
    """Whether the client has what it gets, no row is left, and nothing is on its way that could change this."""
    if client.phase < Phase.DONE or any(each.row is not None or each.plans for each in (first, second)):
        return False
    for part in rest:
        if not isinstance(part, Scheduler):
            if part:
                return False
        elif part.live is not None and not part.live.is_over:
            return False
    boots = [part.boot for part in rest if isinstance(part, Scheduler)]
    return not any(_is_to_be_found(executor, boots) for executor in (first, second))


def _is_to_be_found(executor: Executor, boots: list[int]) -> bool:
    """Whether a scheduler will find a record here that is no end, and carry the request on for a while."""
    record, (slot, boot) = executor.record, executor.driver
    is_known = slot >= 0 and boots[slot] == boot and not executor.is_cut
    return record is not None and not record.is_end and len(record.output) < LENGTH and not is_known
