"""Owns the core and the clock: events go into the core through it; tokens go to the edge at once, plans to the
executors right after. Decides nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.plan.values import BatchPlan
from paceline_scheduler.backend import OutputSink
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import (
    Effects,
    Event,
    ExecutorAttached,
    ExecutorLost,
    ExecutorRemoved,
    ReplyT,
    StepFinished,
    Tick,
)
from paceline_scheduler.core.views import CoreViews
from paceline_scheduler.errors import SchedulerError

_PLANNED_AT_ONCE = (StepFinished, ExecutorAttached, ExecutorLost, ExecutorRemoved, Tick)
"""After other events what arrives in the same turn of the loop is planned together."""

_TOLD_WITHIN_S = 0.01
"""An executor with nothing to do is told what has ended so long after its step, or with the next request."""

_EARLY_S = 0.001
"""A plan is not put off for less."""

_SETTLE_POLL_S = 0.01


class PlanSink(Protocol):
    """Called on the event loop; must not block."""

    def send_plan(self, address: str, plan: BatchPlan) -> None: ...


class Observer(Protocol):
    """Called on the event loop; must not block, nor feed anything."""

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        """Before the event's effects have gone anywhere. Refused ones have not happened."""
        ...


class PlanObserver(Observer, Protocol):
    def planned(self, address: str, now: float, plan: BatchPlan | None, planning_ns: int) -> None:
        """Before the plan is sent; None: there was nothing to plan."""
        ...


class RefusalObserver(PlanObserver, Protocol):
    """Sees what did not happen as well."""

    def refused(self, event: Event[Any], now: float, error: SchedulerError) -> None: ...


class Runtime:
    """It is the edge's Backend. `clock` gives monotonic seconds."""

    def __init__(self, core: Core, clock: Callable[[], float], loop: asyncio.AbstractEventLoop) -> None:
        self.views: CoreViews = core.views
        self._core = core
        self._clock = clock
        self._loop = loop
        self._alarm = Alarm(loop, clock, lambda at_s: self.feed(Tick(), max(at_s, clock())))
        self._observers: list[Observer] = []
        self._plan_observers: list[PlanObserver] = []
        self._refusal_observers: list[RefusalObserver] = []
        self._outputs: OutputSink | None = None
        self._plans: PlanSink | None = None
        self._is_turn_ending = False
        self._paces: dict[str, _Pace] = {}

    def deliver_to(self, sink: OutputSink) -> None:
        """Before anything happens."""
        self._outputs = sink

    def send_plans_to(self, sink: PlanSink) -> None:
        self._plans = sink

    def show(self, observer: Observer) -> None:
        self._observers.append(observer)

    def show_plans(self, observer: PlanObserver) -> None:
        self._observers.append(observer)
        self._plan_observers.append(observer)

    def show_all(self, observer: RefusalObserver) -> None:
        """Let an observer see that, and what the core refuses."""
        self.show_plans(observer)
        self._refusal_observers.append(observer)

    def now_s(self) -> float:
        return self._clock()

    def feed(self, event: Event[ReplyT], now: float | None = None) -> ReplyT:
        now = self._clock() if now is None else now
        try:
            effects = self._core.apply(event, now)
        except SchedulerError as error:
            for refusal_observer in self._refusal_observers:
                refusal_observer.refused(event, now, error)
            raise
        for observer in self._observers:
            observer.saw(event, now, effects)
        if isinstance(event, StepFinished):
            self._pace(event.address).busy_since_s = now
        elif isinstance(event, ExecutorRemoved) and (pace := self._paces.pop(event.address, None)) is not None:
            pace.alarm.set(None)
        self._alarm.set(effects.wake_at)  # first: what is delivered may feed something that wakes earlier
        if effects.tokens or effects.failures:
            assert self._outputs is not None, "the edge is joined before anything happens"
            self._outputs.deliver(effects.tokens, effects.failures)
        if isinstance(event, _PLANNED_AT_ONCE):
            for address in effects.executors_to_plan:
                if isinstance(event, StepFinished) and self.views.is_idle(address):
                    self._pace(address).alarm.set(now + _TOLD_WITHIN_S)
                else:
                    self._plan(address)
        elif effects.executors_to_plan and not self._is_turn_ending:
            self._is_turn_ending = True
            self._loop.call_soon(self._end_turn)
        return effects.reply

    def after_turn(self, work: Callable[[], None]) -> None:
        """Nothing that the core decides waits for it."""
        self._loop.call_soon(work)

    async def until_settled(self) -> None:
        """No plan is in flight and no row waits for its release."""
        self.feed(Tick())
        while self.views.has_plans_in_flight():
            await asyncio.sleep(_SETTLE_POLL_S)
            self.feed(Tick())

    def _end_turn(self) -> None:
        self._is_turn_ending = False
        self.feed(Tick())

    def _plan(self, address: str) -> None:
        """A plan waits while the steps in flight are long: requests that come until then are in it."""
        pace = self._pace(address)
        pace.alarm.set(None)
        while True:
            started_s = self._clock()
            if self.views.due_step(address) is None:
                pace.busy_since_s = started_s
            elif (plan_s := pace.busy_since_s + self._core.busy_beyond_ahead_s(address)) > started_s + _EARLY_S:
                pace.alarm.set(plan_s)
                return
            plan = self._core.plan(address, started_s)
            planning_ns = round((self._clock() - started_s) * 1e9)
            for observer in self._plan_observers:
                observer.planned(address, started_s, plan, planning_ns)
            if plan is None:
                return
            assert self._plans is not None, "the links are joined before anything happens"
            self._plans.send_plan(address, plan)

    def _pace(self, address: str) -> "_Pace":
        if address not in self._paces:
            self._paces[address] = _Pace(Alarm(self._loop, self._clock, lambda _: self._plan(address)))
        return self._paces[address]


class Alarm:
    """Calls `ring` with the time it was set to last, by a clock that gives seconds.

    Timers may fire a moment early; what is due at that time is due.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], ring: Callable[[float], object]
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._ring = ring
        self._at_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at_s: float | None) -> None:
        if at_s == self._at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at_s = at_s
        self._timer = (
            None if at_s is None else self._loop.call_later(max(0.0, at_s - self._clock()), self._go_off, at_s)
        )

    def _go_off(self, at_s: float) -> None:
        self._at_s = self._timer = None
        self._ring(at_s)


@dataclass(slots=True)
class _Pace:
    """When an executor is planned for next, unless something happens there before."""

    alarm: Alarm
    busy_since_s: float = 0.0  # when the oldest step in flight began, at the latest
