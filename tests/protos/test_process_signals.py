"""What ends a process that serves: signals, the first of which is not like the others, and parts that fail."""

import asyncio
import signal

import pytest
import uvloop
from structlog.testing import capture_logs

from paceline.process.callbacks import watch_callbacks
from paceline.process.signals import follow_signals, until_set_or_ended


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_stops_and_each_later_one_is_handed_on(first):
    handed_on = asyncio.Queue()
    stopping = follow_signals(again=handed_on.put_nowait)
    assert not stopping.is_set()
    signal.raise_signal(first)
    await asyncio.wait_for(stopping.wait(), 30)
    assert handed_on.empty()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
        assert await asyncio.wait_for(handed_on.get(), 30) == number


async def test_who_waits_goes_on_when_the_event_is_set_or_a_part_has_ended():
    never, event = asyncio.get_running_loop().create_future(), asyncio.Event()
    waiting = asyncio.create_task(until_set_or_ended(event, never))
    await asyncio.sleep(0)
    assert not waiting.done()
    event.set()
    await asyncio.wait_for(waiting, 30)

    ended = asyncio.get_running_loop().create_future()
    ended.set_result(None)
    await asyncio.wait_for(until_set_or_ended(asyncio.Event(), never, ended), 30)


async def test_what_a_part_failed_with_is_raised_although_the_event_is_set():
    failed, event = asyncio.get_running_loop().create_future(), asyncio.Event()
    failed.set_exception(RuntimeError("a bug"))
    event.set()
    with pytest.raises(RuntimeError, match="a bug"):
        await until_set_or_ended(event, failed)


# A callback that fails has nobody waiting for it: the process hears of it, and can end instead of living half dead


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
