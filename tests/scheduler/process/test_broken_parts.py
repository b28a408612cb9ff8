"""What fails inside the process and has nobody waiting for it ends the process, instead of leaving it half dead."""

import asyncio

import pytest

from both_sides.deployment import attached, scenario
from paceline_executor import process as executor_process
from paceline_scheduler import process as scheduler_process
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.limits import CoreLimits


class EndlessDrain:
    """A runtime and an edge whose requests do not end."""

    views = Core(CoreLimits()).views
    requests = ()

    def feed(self, event):
        """As a runtime."""

    async def drained(self):
        """As an edge."""
        await asyncio.Event().wait()

    def drain(self, *_):
        """As an edge."""


class LoneFleet:
    """Nobody is queued."""

    async def until_handoff(self, _):
        """Never return."""
        await asyncio.Event().wait()


class EndlessService:
    """An executor's service whose requests do not end."""

    async def drain(self, *_):
        """Never return."""
        await asyncio.Event().wait()


async def drain_scheduler(part, broken):
    """Drain for longer than a test waits."""
    runtime, edge, fleet = EndlessDrain(), EndlessDrain(), LoneFleet()
    await scheduler_process._drain(runtime, None, edge, fleet, (part, broken), 3600.0, asyncio.Event())


async def drain_executor(part, broken):
    """The same."""
    await executor_process._drain(EndlessService(), part, broken, 3600.0)


@pytest.mark.parametrize("drain", [drain_scheduler, drain_executor])
@pytest.mark.parametrize("which", [0, 1], ids=["a part", "a callback"])
async def test_what_fails_while_the_process_drains_ends_it_at_once(drain, which):
    """The requests it waits for would never end."""
    parts = [asyncio.get_running_loop().create_future() for _ in range(2)]
    draining = asyncio.create_task(drain(*parts))
    await asyncio.sleep(0)
    parts[which].set_exception(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(draining, 30)


@scenario
async def test_a_link_that_fails_ends_all_links():
    """It attaches again after all that it foresees; that it cannot even say that a stream ended is a bug."""
    async with attached("executor:1") as (deployment, rig):

        def fail(*_):
            raise RuntimeError("a bug")

        rig.listener.detached = fail
        deployment["executor:1"].break_stream()
        with pytest.raises(RuntimeError, match="a bug"):
            await rig._task
