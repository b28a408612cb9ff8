"""Simulated executors on a network in memory, and schedulers that drive them, all inside one virtual-time loop."""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

from paceline.plan.values import PROTOCOLS, ProtocolRange
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.link.claim import Approach
from paceline_scheduler.simulator.service import SimulatedService
from paceline_scheduler.simulator.transport_memory import MemoryNetwork
from paceline_scheduler.testing.requests import make_executor
from paceline_scheduler.testing.rig import SchedulerRig
from paceline_scheduler.testing.virtual_time import run_in_virtual_time

_MAX_VIRTUAL_S = 600


class Deployment:
    """Executors that run while its `async with` block does; `max_num_rows` and `num_blocks` are those of each."""

    def __init__(self, *addresses: str, max_num_rows: int = 8, num_blocks: int = 64, max_plans: int = 4) -> None:
        self.network = MemoryNetwork()
        loop = asyncio.get_running_loop()
        for number, address in enumerate(addresses, 1):
            executor = make_executor(
                incarnation=1000 * number,
                max_num_rows=max_num_rows,
                num_blocks=num_blocks,
                max_plans_in_flight=max_plans,
            )
            self.network.add(address, SimulatedService(executor, loop.time))
        self.steps = [loop.create_task(service.run_steps()) for service in self.network.services.values()]

    def __getitem__(self, address: str) -> SimulatedService:
        """Return the executor at an address."""
        return self.network.services[address]

    def rig(
        self,
        *,
        scheduler_id: str = "scheduler-a",
        approach: Approach = Approach.WAIT,
        protocols: ProtocolRange = PROTOCOLS,
        limits: CoreLimits | None = None,
    ) -> SchedulerRig:
        """Return a scheduler for all executors."""
        return SchedulerRig(
            ",".join(self.network.services),
            self.network,
            scheduler_id=scheduler_id,
            approach=approach,
            protocols=protocols,
            limits=limits,
        )

    async def __aenter__(self) -> "Deployment":
        """Executors run from the beginning."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No executor saw a broken rule."""
        for task in self.steps:
            task.cancel()
        broken = [service.violations for service in self.network.services.values() if service.violations]
        assert not broken, f"rules of the plan protocol were broken: {broken}"


def scenario(main: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Make a test of a coroutine: it runs in virtual time, for ten minutes at most."""

    def test() -> None:
        run_in_virtual_time(asyncio.wait_for(main(), _MAX_VIRTUAL_S))

    test.__name__, test.__doc__ = main.__name__, main.__doc__
    return test
