"""Counts losses that requests survived, and how long they ran nowhere: of a stream, an executor, the scheduler before.

A loss is over with the first plan that goes to one of its requests, wherever that is, or when the last of them has
ended without: whoever waits is not told earlier that all is well.
"""

from dataclasses import dataclass, field
from typing import Any

from paceline.plan.values import BatchPlan, FinishReason, RecordId, StepTimings
from paceline.process.metrics import Meter
from paceline_scheduler.core.ended import EndedRequest
from paceline_scheduler.core.events import (
    BeginAnew,
    Effects,
    Event,
    ExecutorAttached,
    ExecutorLost,
    ExecutorRemoved,
    StreamEnded,
)

DONE = (FinishReason.STOP, FinishReason.LENGTH)
_MAX_REMEMBERED = 10_000  # executors


@dataclass(slots=True)
class _Loss:
    began_s: float
    keys: set[RecordId] = field(default_factory=set)  # of the requests that run nowhere, or wait for their first plan
    kind: str = "stream"  # "executor", once another process has to run them
    back_at: str | None = None  # where rows of these requests wait for their first plan
    is_survived: bool = False  # by one that has ended meanwhile


class Recoveries:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._incarnations: dict[str, int] = {}  # by address, of the last that ever attached
        self._attached: set[str] = set()
        self._losses: dict[str, _Loss] = {}  # by address
        self._is_successor = False
        self.successor_of: str | None = None
        """The executor whose first step tells how long it had none."""

    def stepped(self, address: str, timings: StepTimings) -> None:
        if address == self.successor_of:
            self._meter.observe("recovery_pause_seconds", timings.idle_ns / 1e9, "scheduler")
            self.successor_of = None

    def planned(self, address: str, now: float, plan: BatchPlan) -> None:
        if not self._losses:
            return
        placed = {new.record_id for new in plan.new_requests}
        for lost_at, loss in tuple(self._losses.items()):
            if (loss.back_at == address and len(plan.rows)) or not placed.isdisjoint(loss.keys):
                loss.is_survived = True
                self._over(lost_at, now)

    def ended(self, ended: tuple[EndedRequest, ...], now: float) -> None:
        for lost_at, loss in tuple(self._losses.items()):
            of_it = [each for each in ended if each.request.key in loss.keys]
            loss.is_survived |= any(each.reason in DONE for each in of_it)
            loss.keys.difference_update(each.request.key for each in of_it)
            if not loss.keys:
                self._over(lost_at, now)

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        match event:
            case StreamEnded(address) if address in self._attached:
                self._attached.remove(address)
                if effects.reply:
                    loss = self._losses.setdefault(address, _Loss(now))
                    loss.keys.update(effects.reply)
                    loss.back_at = None
            case ExecutorAttached(description, snapshot):
                address, incarnation = description.address, description.incarnation
                before = self._incarnations.get(address)
                if before is None and any(seen.request is not None for seen in snapshot.rows):
                    if not self._is_successor:
                        self._meter.add("recoveries_total", 1, "scheduler")
                        self._is_successor, self.successor_of = True, address
                elif before is not None and before != incarnation and address == self.successor_of:
                    self.successor_of = None
                for lost_at, loss in self._losses.items():
                    if lost_at == address:
                        loss.kind = "stream" if before == incarnation else "executor"
                    if not loss.keys.isdisjoint(effects.reply):
                        loss.back_at = address
                self._incarnations.pop(address, None)
                self._incarnations[address] = incarnation
                if len(self._incarnations) > _MAX_REMEMBERED:
                    del self._incarnations[next(iter(self._incarnations))]
                self._attached.add(address)
            case ExecutorLost(address) | ExecutorRemoved(address):
                if address in self._losses:
                    self._losses[address].kind = "executor"
                if isinstance(event, ExecutorRemoved):
                    self._attached.discard(address)
                    if address == self.successor_of:
                        self.successor_of = None
            case BeginAnew():
                self._incarnations.clear()
                self._attached.clear()
                self._losses.clear()
                self._is_successor, self.successor_of = False, None

    def _over(self, lost_at: str, now: float) -> None:
        loss = self._losses.pop(lost_at)
        self._meter.observe("recovery_pause_seconds", now - loss.began_s, loss.kind)
        if loss.is_survived:
            self._meter.add("recoveries_total", 1, loss.kind)
