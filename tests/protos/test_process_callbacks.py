"""A callback that fails has nobody waiting for it: the process hears of it, and can end instead of living half dead."""

import asyncio

import pytest
import uvloop
from structlog.testing import capture_logs

from paceline.process.callbacks import watch_callbacks


def failing(module):
    """A callback as if it were of that module."""
    scope = {"__name__": module}
    exec("def fail(): raise RuntimeError('a bug')", scope)  # noqa: S102  for a frame with that name
    return scope["fail"]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "module", ["paceline_scheduler.link.fleet", "paceline_executor.link.service", "paceline.process.signals"]
)
def test_a_callback_that_fails_is_heard_of(new_loop, module):
    """One of a library only reaches the log, which is as far as libraries take it."""

    async def scene():
        loop = asyncio.get_running_loop()
        broken = watch_callbacks(loop)
        loop.call_soon(failing("grpc.aio"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not broken.done()
        for _ in range(2):
            loop.call_later(0.001, failing(module))
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(broken, 30)
        async with asyncio.timeout(30):
            while len(logged) < 2:
                await asyncio.sleep(0.001)

    with asyncio.Runner(loop_factory=new_loop) as runner, capture_logs() as logged:
        runner.run(scene())
    told = [(event["event"], str(event["exc_info"])) for event in logged]
    assert told == [("callback_failed", "a bug")] * 2
