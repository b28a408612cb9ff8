"""What executors do in the attach model: the fence, the queue of plans, and the order of acceptance.

Follows `executor/paceline_executor/link`: `fence`, `plan_stream`, `attachments`, `step_loop`. Time is left out: what
may happen after 50 ms or a second may happen at any time.
"""

from collections.abc import Iterator

from protocol_model.attach_state import Damage, Executor, Place, Plan, Safeguard, Stream, with_stream
from protocol_model.checker import Move

_Change = tuple[str, Executor]


class ExecutorMoves:
    """The moves of one executor, given which safeguards are on."""

    def __init__(self, number: int, safeguards: frozenset[Safeguard]) -> None:
        self.name = f"executor {number}"
        self._safeguards = safeguards

    def moves(self, executor: Executor) -> Iterator[Move]:
        """All it can do by itself."""
        for stream in executor.streams:
            for label, after in self._hear(executor, stream):
                yield f"{self.name} {label} {_named(stream)}", (after,)
        for label, after in (*self._turn_to_the_line(executor), *self._run(executor)):
            yield f"{self.name} {label}", (after,)

    def displace(self, executor: Executor) -> Iterator[_Change]:
        """Let the first in the queue have the executor, whoever holds it."""
        waiting = [stream for stream in executor.streams if stream.place is Place.IN_LINE]
        if waiting:
            best = max(waiting, key=lambda stream: stream.claim)
            yield f"accepts {_named(best)} from the line", self._accept(executor, best)

    def _turn_to_the_line(self, executor: Executor) -> Iterator[_Change]:
        holder = executor.holder
        if holder is not None and Safeguard.LINE in self._safeguards:
            is_silent = holder.damage is not Damage.NONE or not holder.is_open
            if not is_silent or Safeguard.LEASE not in self._safeguards:
                return
        yield from self.displace(executor)

    def _hear(self, executor: Executor, stream: Stream) -> Iterator[_Change]:
        if stream.place is Place.ARRIVING:
            yield "gets the hello of", self._arrive(executor, stream)
        if stream.plans:
            plan = stream.plans[0]
            yield f"gets plan {plan.step_id} of epoch {plan.epoch} from", self._take(executor, stream)
        if stream.place is Place.ENDED and not stream.is_open:
            yield "gets nothing more from", with_stream(executor, stream, stream._replace(plans=()))
        is_broken = stream.damage is Damage.BROKEN or (not stream.is_open and stream.damage is Damage.NONE)
        if stream.place is not Place.ENDED and is_broken:
            # More of what it carried may still arrive, and plans that are queued may still be launched.
            yield "sees the end of", with_stream(executor, stream, stream._replace(place=Place.ENDED))

    def _arrive(self, executor: Executor, stream: Stream) -> Executor:
        is_return = stream.scheduler_id == executor.last[1] and stream.term >= executor.last[0]
        if stream.claim < executor.last and Safeguard.TERM_ORDER in self._safeguards:
            return with_stream(executor, stream, _refused(stream, executor.last[0]))
        if executor.epoch == 0 or is_return:
            return self._accept(executor, stream)
        waiting = with_stream(executor, stream, stream._replace(place=Place.IN_LINE))
        return waiting._replace(highest_term=max(executor.highest_term, stream.term))

    def _accept(self, executor: Executor, accepted: Stream) -> Executor:
        falls = accepted.claim < executor.last
        after = executor._replace(
            epoch=executor.epoch + 1,
            last=accepted.claim,
            highest_term=max(executor.highest_term, accepted.term),
            queue=() if Safeguard.DROPPED_QUEUE in self._safeguards else executor.queue,
            num_taken=0,
            num_launched=0,
            broken="a lower claim was accepted after a higher one" if falls else executor.broken,
        )
        for stream in executor.streams:
            after = with_stream(after, stream, self._after_acceptance(stream, accepted))
        return self._greet(after)

    def _after_acceptance(self, stream: Stream, accepted: Stream) -> Stream:
        if stream is accepted:
            return stream._replace(place=Place.ACCEPTED)
        if stream.place in (Place.ACCEPTED, Place.DRIVING):
            return stream._replace(place=Place.ENDED)
        if stream.place is Place.IN_LINE and stream.claim <= accepted.claim:
            if stream.scheduler_id == accepted.scheduler_id:
                return stream._replace(place=Place.ENDED)
            if Safeguard.TERM_ORDER in self._safeguards:
                return _refused(stream, accepted.term)
        return stream

    def _greet(self, executor: Executor) -> Executor:
        """Send welcome and snapshot to the stream that was accepted, once the running step has ended."""
        holder = executor.holder
        must_wait = bool(executor.running_epoch) and Safeguard.STEP_BOUNDARY in self._safeguards
        if holder is None or holder.place is Place.DRIVING or must_wait:
            return executor
        welcome = executor.epoch if holder.is_open else 0
        return with_stream(executor, holder, holder._replace(place=Place.DRIVING, welcome=welcome))

    def _take(self, executor: Executor, stream: Stream) -> Executor:
        """Count a plan in. It may come late, from a stream that has ended: only its numbers tell."""
        plan = stream.plans[0]
        shorter = stream._replace(plans=stream.plans[1:])
        if self._is_stale(plan, executor):
            return with_stream(executor, stream, shorter)
        if plan.step_id != executor.num_taken + 1 and Safeguard.STEP_ORDER in self._safeguards:
            return with_stream(executor, stream, shorter._replace(place=Place.ENDED))
        taken = with_stream(executor, stream, shorter)
        return taken._replace(queue=(*executor.queue, plan), num_taken=executor.num_taken + 1)

    def _is_stale(self, plan: Plan, executor: Executor) -> bool:
        return (plan.epoch != executor.epoch and Safeguard.EPOCH_EQUALITY in self._safeguards) or (
            plan.incarnation != executor.incarnation and Safeguard.INCARNATION_EQUALITY in self._safeguards
        )

    def _run(self, executor: Executor) -> Iterator[_Change]:
        if executor.running_epoch:
            yield f"ends a step of epoch {executor.running_epoch}", self._greet(_finish(executor))
        elif executor.queue:
            plan = executor.queue[0]
            yield f"launches step {plan.step_id} of epoch {plan.epoch}", _launch(executor)


def _named(stream: Stream) -> str:
    return f"{'AB'[stream.slot]} (term {stream.term}, id {stream.scheduler_id})"


def _refused(stream: Stream, holder_term: int) -> Stream:
    return stream._replace(place=Place.ENDED, holder_term=holder_term if stream.is_open else 0)


def _launch(executor: Executor) -> Executor:
    plan = executor.queue[0]
    broken = executor.broken
    if (plan.incarnation, plan.epoch) != (executor.incarnation, executor.epoch):
        broken = f"a plan of epoch {plan.epoch} of incarnation {plan.incarnation} took effect in another"
    elif plan.scheduler_id != executor.last[1]:
        broken = f"two schedulers' plans took effect in epoch {executor.epoch}"
    elif plan.step_id != executor.num_launched + 1:
        broken = f"step {plan.step_id} took effect after step {executor.num_launched}"
    return executor._replace(
        queue=executor.queue[1:],
        running_epoch=executor.epoch,
        num_launched=executor.num_launched + 1,
        broken=broken,
    )


def _finish(executor: Executor) -> Executor:
    holder = executor.holder
    is_late = executor.running_epoch < executor.epoch and holder is not None and holder.place is Place.DRIVING
    broken = f"a step of epoch {executor.running_epoch} took effect after the snapshot of the next"
    return executor._replace(running_epoch=0, broken=broken if is_late else executor.broken)
