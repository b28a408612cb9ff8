"""A scheduler without an edge: core, runtime and links as in production, a collecting client, executors of any kind."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from paceline.plan.values import Approach
from paceline.plan.versions import PROTOCOLS, ProtocolRange
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import Submit
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.request import Request
from paceline_scheduler.link.claim import OwnClaim
from paceline_scheduler.link.discovery import Discovery, Resolver, parse_executors, resolve_with_system
from paceline_scheduler.link.executors import LinkedExecutors
from paceline_scheduler.link.fleet import Fleet
from paceline_scheduler.link.leadership import Leadership, ServingStatus
from paceline_scheduler.link.linked_executor import ShownState
from paceline_scheduler.link.listener import Listener
from paceline_scheduler.link.tokenizers import TokenizerStore
from paceline_scheduler.link.transport import Transport
from paceline_scheduler.observers.steps import StepObserver
from paceline_scheduler.runtime import Runtime
from scheduler_rig.collector import OutputCollector


class SchedulerRig:
    """It runs while its `async with` block does, on the loop's clock."""

    def __init__(
        self,
        executors: str,
        transport: Transport,
        *,
        scheduler_id: str = "scheduler-a",
        approach: Approach = Approach.WAIT,
        protocols: ProtocolRange = PROTOCOLS,
        limits: CoreLimits | None = None,
        resolver: Resolver = resolve_with_system,
        tokenizers: TokenizerStore | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.client = OutputCollector()
        self.statuses: list[ServingStatus] = []
        self.leadership = Leadership(OwnClaim(scheduler_id, approach, protocols))
        self.leadership.claim.address = f"{scheduler_id}:50051"
        self.core = Core(limits or CoreLimits())
        self.runtime = Runtime(self.core, loop.time, loop)
        self.runtime.deliver_to(self.client)
        self.steps = StepObserver(self.runtime.views)
        self.executors = LinkedExecutors(self.runtime, self.steps, self.leadership)
        self.executors.on_readiness(lambda readiness: self.statuses.append(readiness.status))
        self.listener = Listener(self.runtime, self.executors)
        discovery = Discovery(parse_executors(executors), resolver)
        self.fleet = Fleet(discovery, transport, self.leadership, self.listener, loop.time, lambda: 0.5, tokenizers)
        self._task: asyncio.Task[NoReturn] | None = None

    async def __aenter__(self) -> "SchedulerRig":
        self._task = asyncio.get_running_loop().create_task(self.fleet.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Ends as a process that has died."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.runtime.feed(Submit((request,)))

    def states(self) -> dict[str, ShownState]:
        return {status.address: ShownState(status.state) for status in self.executors.statuses()}

    async def until(self, holds: Callable[[], bool]) -> None:
        """The test's own time limit is the bound."""
        while not holds():  # noqa: ASYNC110 - any condition can be waited for
            await asyncio.sleep(0.01)

    async def until_idle(self) -> None:
        await self.until(lambda: not any(self.runtime.views.with_listener()))

    async def until_ready(self, num_executors: int = 1) -> None:
        await self.until(lambda: list(self.states().values()).count(ShownState.READY) >= num_executors)
