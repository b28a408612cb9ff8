"""The executors that are looked for: what the edge, operators and health checks see of them beside the core.

Also where plans go. Knows who is served and who leads; what the links say comes in through `listener`.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from paceline.plan.values import BatchPlan
from paceline_scheduler.backend import Arrival, ExecutorStatus, ServedModel
from paceline_scheduler.core.events import BeginDrain, DrainExecutor, Effects, Event
from paceline_scheduler.link.attachment import Attachment, served_models, status
from paceline_scheduler.link.readiness import Readiness, Standing, readiness_of
from paceline_scheduler.link.sync_gate import SyncGate
from paceline_scheduler.observers.steps import StepObserver
from paceline_scheduler.runtime import Runtime


class Executors:
    """By address. It joins the runtime: as the sink of plans, and as an observer of what changes who is served."""

    def __init__(self, runtime: Runtime, steps: StepObserver, loop: asyncio.AbstractEventLoop) -> None:
        self.by_address: dict[str, Attachment] = {}
        self.gate = SyncGate(loop, self.tell_readiness)
        self._views = runtime.views
        self._steps = steps
        self._on_readiness: Callable[[Readiness], None] = lambda _: None
        self._told = Readiness(Standing.UNREADY)
        runtime.show(steps)
        runtime.show(self)
        runtime.send_plans_to(self)

    # What the runtime says

    def send_plan(self, address: str, plan: BatchPlan) -> None:
        """Put a plan on its way to an executor that is attached."""
        port = self.by_address[address].port
        assert port is not None, "only what is attached is planned for"
        port.send_plan(plan)

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        """Who drains takes nothing new."""
        del now, effects
        if isinstance(event, DrainExecutor | BeginDrain):
            self.tell_readiness()

    def planned(self, address: str, now: float, plan: BatchPlan | None, planning_ns: int) -> None:
        """Plans change nothing of who is served."""

    # What a new request would meet

    def on_readiness(self, tell: Callable[[Readiness], None]) -> None:
        """Tell of every change, from now on, of what would become of a new request."""
        self._on_readiness = tell

    def tell_readiness(self) -> None:
        """Tell what would become of a new request, if that has changed."""
        readiness = self.readiness
        if readiness != self._told:
            self._told = readiness
            self._on_readiness(readiness)

    @property
    def readiness(self) -> Readiness:
        """What would become of a new request."""
        if self._views.is_draining:
            return Readiness(Standing.UNREADY)
        return readiness_of(self.gate.holder, is_served=any(executor.is_serving for executor in self._open()))

    @property
    def is_at_rest(self) -> bool:
        """Whether nobody is served here, and nobody can come back to what an executor runs."""
        return (self.gate.is_open or self.gate.holder is not None) and not self._views.num_unfinished()

    async def until_synced(self, arrival: Arrival) -> None:
        """Return when it is known what every executor runs; raises NoExecutorError when that does not come soon."""
        await self.gate.passed(arrival)

    def require_lead(self) -> None:
        """Raise StandbyError while another scheduler is known to drive the executors."""
        self.gate.require_lead()

    # What there is

    def models(self) -> tuple[ServedModel, ...]:
        """Return the models of executors that are attached, or were a moment ago and are not lost."""
        return served_models(self.by_address.values())

    def open_models(self) -> tuple[ServedModel, ...]:
        """Return the models of which new requests would be run."""
        return served_models(self._open())

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        """Return all executors that are looked for, by address."""
        return tuple(
            status(address, executor, self._views, self._steps.totals(address))
            for address, executor in sorted(self.by_address.items())
        )

    def _open(self) -> Iterator[Attachment]:
        return (executor for address, executor in self.by_address.items() if not self._views.drains(address))
