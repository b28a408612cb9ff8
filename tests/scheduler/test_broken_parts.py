"""What fails inside the process and has nobody waiting for it ends the process, instead of leaving it half dead."""

import asyncio

import pytest
import uvloop
from structlog.testing import capture_logs

from paceline_executor import process as executor_process
from paceline_executor.broken_callbacks import watch_callbacks as watch_executor
from paceline_scheduler import process as scheduler_process
from paceline_scheduler.broken_callbacks import watch_callbacks as watch_scheduler
from paceline_scheduler.testing.deployment import Deployment, scenario


def failing(module):
    """A callback as if it were of that module."""
    scope = {"__name__": module}
    exec("def fail(): raise RuntimeError('a bug')", scope)  # noqa: S102  for a frame with that name
    return scope["fail"]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("watch", "package"), [(watch_scheduler, "paceline_scheduler"), (watch_executor, "paceline_executor")]
)
def test_a_callback_that_fails_is_heard_of(new_loop, watch, package):
    """One of a library only reaches the log, which is as far as libraries take it."""

    async def scene():
        loop = asyncio.get_running_loop()
        broken = watch(loop)
        loop.call_soon(failing("grpc.aio"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not broken.done()
        for _ in range(2):
            loop.call_later(0.001, failing(f"{package}.link.driver"))
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(broken, 30)
        async with asyncio.timeout(30):
            while len(logged) < 2:
                await asyncio.sleep(0.001)

    with asyncio.Runner(loop_factory=new_loop) as runner, capture_logs() as logged:
        runner.run(scene())
    told = [(event["event"], str(event["exc_info"])) for event in logged]
    assert told == [("callback_failed", "a bug")] * 2


class EndlessDrain:
    """A driver and an edge whose requests do not end."""

    can_be_succeeded = False

    def begin_drain(self):
        """As a driver."""

    async def drained(self):
        """As an edge."""
        await asyncio.Event().wait()

    def drain(self, *_):
        """As an edge."""


class EndlessService:
    """An executor's service whose requests do not end."""

    async def drain(self, *_):
        """Never return."""
        await asyncio.Event().wait()


async def drain_scheduler(part, broken):
    """Drain for longer than a test waits."""
    await scheduler_process._drain(EndlessDrain(), EndlessDrain(), None, part, broken, 3600.0, asyncio.Event())


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
    async with Deployment("executor:1") as deployment, deployment.rig() as rig:
        await rig.until_ready()

        def fail(*_):
            raise RuntimeError("a bug")

        rig.driver.detached = fail
        deployment["executor:1"].break_stream()
        with pytest.raises(RuntimeError, match="a bug"):
            await rig._task
