"""Executors on a network in memory, and schedulers that drive them, all inside one virtual-time loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from both_sides.audited import expected_output, make_executor
from both_sides.network import MemoryNetwork
from both_sides.served import MemoryCall, ServedExecutor
from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import Claim, Hello
from paceline_scheduler.backend import Arrival
from paceline_scheduler.core.events import Resume
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.request import Request, ResumePoint
from scheduler_rig.rig import SchedulerRig
from virtual_time import run_in_virtual_time

_MAX_VIRTUAL_S = 600


class Deployment:
    """Executors that run while its `async with` block does; `max_num_rows` and `num_blocks` are those of each."""

    def __init__(self, *addresses: str, max_num_rows: int = 8, num_blocks: int = 64, max_plans: int = 4) -> None:
        self.network = MemoryNetwork()
        kind = make_executor(max_num_rows=max_num_rows, num_blocks=num_blocks).kind
        for number, address in enumerate(addresses, 1):
            self.network.add(address, ServedExecutor(kind, 1000 * number, max_plans))

    def __getitem__(self, address: str) -> ServedExecutor:
        return self.network.executors[address]

    async def stranger(
        self, at: str, scheduler_id: str, term: int, *, takes_over: bool = False, address: str = ""
    ) -> MemoryCall:
        """Say hello to an executor, as a scheduler that says nothing more; returns its stream once that is answered."""
        stream = self.network.connect(at).attach()
        await stream.write(Hello(Claim(term, scheduler_id, address), takeover=takes_over))
        await stream.read()
        return stream

    def rig(self, **options: Any) -> SchedulerRig:  # noqa: ANN401  those of the rig
        """Return a scheduler for all executors."""
        return SchedulerRig(",".join(self.network.executors), self.network, **options)

    async def __aenter__(self) -> "Deployment":
        """Executors run from the beginning."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No executor saw a broken rule."""
        broken = [executor.violations for executor in self.network.executors.values() if executor.violations]
        for executor in self.network.executors.values():
            executor.stop()
        assert not broken, f"rules of the plan protocol were broken: {broken}"


@asynccontextmanager
async def attached(
    *addresses: str, limits: CoreLimits | None = None, num_blocks: int = 64
) -> AsyncIterator[tuple[Deployment, SchedulerRig]]:
    """Run executors and a scheduler that has attached to each of them."""
    async with Deployment(*addresses, num_blocks=num_blocks) as deployment, deployment.rig(limits=limits) as rig:
        await rig.until_ready(len(addresses))
        yield deployment, rig


async def come_over(requests: Sequence[Request], before: SchedulerRig, after: SchedulerRig) -> None:
    """Let the clients of these requests go to another scheduler with all they hold, once it takes them."""
    await after.executors.until_synced(Arrival.BACK)
    for request in requests:
        held = np.array(before.client.token_ids.get(request.handle, []), dtype=np.int32)
        point = ResumePoint(len(held), rolling_hash(HASH_START, held), 1, held)
        (resumed,) = after.runtime.feed(Resume((replace(request, attachment=2, point=point),)))
        if len(held):
            after.client.token_ids[request.handle] = held.tolist()
            after.client.forget_after(request.handle, len(held))
        if resumed.outputs is not None:
            after.client.deliver((resumed.outputs,), ())


def assert_whole(rig: SchedulerRig, *requests: Request) -> None:
    """Each of these requests has ended, with what an undisturbed run gives."""
    for request in requests:
        assert tuple(rig.client.token_ids[request.handle]) == expected_output(request)
        assert request.handle in rig.client.finishes


def scenario(main: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Make a test of a coroutine: it runs in virtual time, for ten minutes at most."""

    def test() -> None:
        run_in_virtual_time(asyncio.wait_for(main(), _MAX_VIRTUAL_S))

    test.__name__, test.__doc__ = main.__name__, main.__doc__
    return test
