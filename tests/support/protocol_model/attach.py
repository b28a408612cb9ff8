"""The attach model: who drives the executors, after crashes, broken streams, late messages and takeovers.

Invariants: in one epoch of an executor the plans of one scheduler take effect, each once and in order; no plan of an
epoch or incarnation that has ended does; the snapshot of an epoch holds all that came before it; claims accepted never
go down. In the end one scheduler drives both executors, and goes on doing so.

Plans go to the first executor only: what becomes of them changes nothing elsewhere.
"""

from collections.abc import Callable, Iterator
from enum import Enum

from protocol_model.attach_executor import ExecutorMoves
from protocol_model.attach_scheduler import LinkMoves
from protocol_model.attach_state import Damage, Executor, Faults, Place, Safeguard, Scheduler, Stream, with_stream
from protocol_model.checker import Kind, Model, Move, Rule

ALL_SAFEGUARDS = frozenset(Safeguard)
_A, _B, _FIRST, _SECOND, _FAULTS = range(5)


class Start(Enum):
    """Where the model begins."""

    BOOTING = "both schedulers have just booted"
    SETTLED = "one scheduler drives both executors, the other is queued at both"


def attach_model(
    start: Start, faults: Faults, num_plans: int, safeguards: frozenset[Safeguard] = ALL_SAFEGUARDS
) -> Model:
    """Return the model in which so much may happen, and so many plans at most are sent on a stream."""
    rules = [rule for slot in (_A, _B) for rule in _scheduler_rules(slot, safeguards)]
    for number, place in enumerate((_FIRST, _SECOND), 1):
        executor = ExecutorMoves(number, safeguards)
        rules.append(Rule(Kind.STEP, (place,), executor.moves))
        rules.append(Rule(Kind.FAULT, (place, _FAULTS), _Accidents(executor).moves))
    return Model((*_beginning(start, num_plans), faults), tuple(rules), _violation, _is_settled)


def _scheduler_rules(slot: int, safeguards: frozenset[Safeguard]) -> Iterator[Rule]:
    for number, here, there in ((1, _FIRST, _SECOND), (2, _SECOND, _FIRST)):
        link = LinkMoves(slot, number, safeguards)
        everything = (slot, here, there, _FAULTS)
        rises = (_A, _B, here), _ForSlot(slot, link.must_rise).holds
        ends, rests = ((here,), link.sees_end), ((here,), link.is_resting)
        yield Rule(Kind.STEP, (slot, here), link.look)
        yield Rule(Kind.STEP, (slot, here), link.dial)
        yield Rule(Kind.STEP, (slot, here, there), link.rise_alone, *rises)
        yield Rule(Kind.SLOW_STEP, everything, link.rise_everywhere, *rises)
        yield Rule(Kind.FAULT, everything, link.rise_hastily, *rises)
        yield Rule(Kind.STEP, (here,), link.drive)
        yield Rule(Kind.STEP, everything, link.see_end, *ends)
        yield Rule(Kind.SLOW_STEP, (here, there), link.rest, *rests)
        yield Rule(Kind.FAULT, (here, _FAULTS), link.rest_too_little, *rests)
        if number == 1:
            yield Rule(Kind.FAULT, everything, link.crash, (_FAULTS,), _may_crash)


class _ForSlot:
    """A condition on one scheduler, as one on both: conditions that look at the same parts are looked up together."""

    def __init__(self, slot: int, condition: Callable[[Scheduler, Executor], bool]) -> None:
        self._slot = slot
        self._condition = condition

    def holds(self, a: Scheduler, b: Scheduler, here: Executor) -> bool:
        """Whether it holds for the scheduler."""
        return self._condition(b if self._slot else a, here)


def _may_crash(faults: Faults) -> bool:
    return faults.crashes > 0


def _beginning(start: Start, num_plans: int) -> tuple[Scheduler, Scheduler, Executor, Executor]:
    if start is Start.BOOTING:
        return Scheduler(1), Scheduler(2), Executor(num_plans), Executor(0)
    driving, waiting = Stream(0, 1, 1, Place.DRIVING, epoch=1), Stream(1, 2, 2, Place.IN_LINE)
    streams, known = (driving, waiting), (True, False)
    first = Executor(num_plans, epoch=1, last=driving.claim, highest_term=2, streams=streams, known=known)
    return Scheduler(1, 1), Scheduler(2, 2), first, first._replace(max_plans=0)


class _Accidents:
    """All that befalls an executor and the streams to it."""

    def __init__(self, executor: ExecutorMoves) -> None:
        self._executor = executor

    def moves(self, executor: Executor, faults: Faults) -> Iterator[Move]:
        """One of what is left of each kind."""
        name = self._executor.name
        if faults.crashes:
            left = faults._replace(crashes=faults.crashes - 1)
            yield f"{name} dies and comes back", (_restarted(executor), left)
        if faults.displacements:
            left = faults._replace(displacements=faults.displacements - 1)
            for label, after in self._executor.displace(executor):
                yield f"though its holder lives, {name} {label}", (after, left)
        if faults.cuts:
            left = faults._replace(cuts=faults.cuts - 1)
            for label, after in _cut(executor):
                yield f"{label} {name}", (after, left)
        if faults.strays:
            left = faults._replace(strays=faults.strays - 1)
            for label, after in _strayed(executor):
                yield f"{label} {name}", (after, left)


def _restarted(executor: Executor) -> Executor:
    """All it knew is gone; what was on its way from or to the old process may still arrive."""
    restarted = Executor(executor.max_plans, executor.incarnation + 1, resting=executor.resting)
    for stream in executor.streams:
        ended = stream._replace(place=Place.ENDED, damage=Damage.RESTARTED, holder_term=0)
        restarted = with_stream(restarted, None, ended)
    return restarted


def _cut(executor: Executor) -> Iterator[tuple[str, Executor]]:
    for stream in executor.streams:
        if stream.is_open and stream.damage is Damage.NONE and stream.place is not Place.ENDED:
            broken = stream._replace(damage=Damage.BROKEN)
            yield f"a stream breaks between {'AB'[stream.slot]} and", with_stream(executor, stream, broken)
            half_open = stream._replace(damage=Damage.HALF_OPEN)
            yield f"a stream falls silent between {'AB'[stream.slot]} and", with_stream(executor, stream, half_open)


def _strayed(executor: Executor) -> Iterator[tuple[str, Executor]]:
    for stream in executor.streams:
        if stream.plans:
            step_id, rest = stream.plans[0].step_id, stream.plans[1:]
            yield f"plan {step_id} is lost on its way to", with_stream(executor, stream, stream._replace(plans=rest))
            doubled = stream._replace(plans=(stream.plans[0], *stream.plans))
            yield f"plan {step_id} is doubled on its way to", with_stream(executor, stream, doubled)


def _violation(a: Scheduler, b: Scheduler, first: Executor, second: Executor, faults: Faults) -> str:  # noqa: ARG001
    return first.broken or second.broken


def _is_settled(a: Scheduler, b: Scheduler, first: Executor, second: Executor, faults: Faults) -> bool:  # noqa: ARG001
    """Whether one scheduler drives both executors."""
    holder = first.holder
    return holder is not None and _is_driven(first, holder.slot) and _is_driven(second, holder.slot)


def _is_driven(executor: Executor, slot: int) -> bool:
    """Whether a scheduler drives an executor, and nothing that it sent long ago is still on its way there."""
    stream = executor.open_stream(slot)
    return (
        stream is not None
        and stream.place is Place.DRIVING
        and stream.damage is Damage.NONE
        and stream.epoch == executor.epoch
        and executor.num_launched == executor.max_plans
        and not executor.running_epoch
        and not stream.plans
        and sum(each.slot == slot for each in executor.streams) == 1
    )
