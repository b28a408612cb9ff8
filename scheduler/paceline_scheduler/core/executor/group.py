"""All executors of a scheduler, by address: which of them take requests of a model, and what one may admit now.

Decides nothing about a step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from paceline.plan.values import RecordId
from paceline_scheduler.core.executor.attachment import Attachment
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest, Meant
from paceline_scheduler.core.planning.capacity import Capacity
from paceline_scheduler.core.planning.dispatch import Dispatch, KnownExecutors
from paceline_scheduler.core.planning.planner import Waiting
from paceline_scheduler.errors import ExecutorLeavingError, NoExecutorError

_NOT_ATTACHED_RETRY_S = 1.0


class ExecutorGroup:
    """An executor is *awaited* until it was attached or lost: it may run requests that nobody here knows of, so nothing
    is admitted anywhere meanwhile. Lost ones are kept without rows.
    """

    def __init__(self) -> None:
        self.by_address: dict[str, Attachment] = {}
        self._awaited: dict[str, None] = {}

    def __iter__(self) -> Iterator[Attachment]:
        return iter(self.by_address.values())

    @property
    def is_synced(self) -> bool:
        return not self._awaited

    def expect(self, addresses: Iterable[str]) -> None:
        self._awaited.update(dict.fromkeys(addresses))

    def attach(self, executor: Attachment) -> None:
        self.by_address[executor.description.address] = executor
        self.resolved(executor.description.address)

    def stream_ended(self, address: str) -> None:
        if address in self.by_address:
            self.by_address[address].attached = False

    def running_at(self, address: str) -> tuple[RecordId, ...]:
        """The requests on its rows that have not ended."""
        executor = self.by_address.get(address)
        rows = () if executor is None else executor.ledger.rows.live
        return tuple(
            live.request.key for live in rows if live is not None and not live.is_orphan and live.final is None
        )

    def remove(self, address: str) -> None:
        self.resolved(address)
        self.by_address.pop(address, None)

    def drain(self, address: str, *, is_leaving: bool) -> int:
        executor = self._attached_once(address)
        executor.draining = True
        executor.leaving = executor.leaving or is_leaving
        return executor.ledger.rows.num_running

    def undrain(self, address: str) -> None:
        executor = self._attached_once(address)
        if executor.leaving:
            raise ExecutorLeavingError(f"executor {address!r} was told to end and is going away; restart it")
        executor.draining = False

    def drains(self, address: str) -> bool:
        executor = self.by_address.get(address)
        return executor is not None and executor.draining

    def _attached_once(self, address: str) -> Attachment:
        executor = self.by_address.get(address)
        if executor is None:
            sentence = f"executor {address!r} is known but not attached now; try again"
            raise NoExecutorError(sentence, _NOT_ATTACHED_RETRY_S)
        return executor

    def resolved(self, address: str) -> None:
        self._awaited.pop(address, None)

    def serving(self, model: str) -> list[Attachment]:
        return [executor for executor in self if _serves(executor, model)]

    def forget_records(self, key: RecordId, kept_at: str | None = None) -> None:
        for address, executor in self.by_address.items():
            if address != kept_at:
                executor.ledger.next_plan.forgets.append(key)

    def waiting_for(
        self,
        executor: Attachment,
        queue: Sequence[LiveRequest],
        limits: CoreLimits,
        now: float,
        known: KnownExecutors,
    ) -> Waiting:
        if self._awaited:
            return Waiting(())
        address, model = executor.description.address, executor.description.model
        if executor.draining:
            # What was begun and no other could hold ends here, preempted or not.
            others = self.serving(model)
            remaining = [w for w in queue if w.attempt and not any(w.fits(other.description) for other in others)]
            others_have_room = len(remaining) == len(queue) and others
            return Waiting(remaining, takes=_takers(others, limits) if others_have_room else None)
        if not queue or len(self.by_address) == 1:
            return Waiting(queue)
        dispatch = Dispatch(address, lambda: [other.view() for other in self.serving(model)], limits, now, known)

        def was_left(live: LiveRequest) -> bool:
            meant = self._meant(live, now)
            if meant is not None:
                dispatch.count_in(live, meant)
            return meant is not None and meant.address != address

        def is_for_others(live: LiveRequest) -> bool:
            is_better_elsewhere = live.suspicion.is_better_elsewhere(address)
            if is_better_elsewhere is not None:
                others = (other for other in self.serving(model) if other is not executor)
                return is_better_elsewhere and any(live.fits(other.description) for other in others)
            return self._meant(live, now) is None and dispatch.is_for_others(live)

        return Waiting(queue, is_for_others, was_left, dispatch.meant)

    def _meant(self, live: LiveRequest, now: float) -> Meant | None:
        """Who has planned since, or takes no requests any more, is not waited for."""
        meant = None if live.left is None or live.was_left_long(now) else live.left.meant
        other = None if meant is None else self.by_address.get(meant.address)
        if meant is None or other is None or not _serves(other, live.request.model):
            return None
        return meant if other.ledger.num_plans == meant.num_plans else None


def _serves(executor: Attachment, model: str) -> bool:
    return executor.attached and not executor.draining and executor.description.model == model


def _takers(others: Sequence[Attachment], limits: CoreLimits) -> Callable[[LiveRequest], bool]:
    """The predicate also counts the request in."""
    rooms = [Capacity(other.view(), limits) for other in others]

    def takes(live: LiveRequest) -> bool:
        return any(room.take_if_fits(live) for room in rooms)

    return takes
