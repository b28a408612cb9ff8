"""What ends a process that serves: signals, the first of which is not like the others, and parts that fail."""

import asyncio
import signal

import pytest

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
