"""The private event loop: results, errors and interrupts pass through it, a fork does not."""

import _thread
import asyncio
import gc
import inspect
import os
import signal
import threading

import pytest

from paceline_client.errors import ClientClosedError
from paceline_client.loop_thread import LoopThread


@pytest.fixture
def loop_thread():
    loop_thread = LoopThread("test")
    yield loop_thread
    loop_thread.close()


@pytest.fixture
def no_collection():
    """Python drops an interrupt that falls into a finalizer: run none of other tests' meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def answer():
    return threading.current_thread().name


def test_work_runs_on_the_private_thread(loop_thread):
    """A daemon, so that it never keeps a program alive."""
    assert loop_thread.run(answer()) == "test"
    assert loop_thread.is_running
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "test")


def test_errors_reach_the_caller(loop_thread):
    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        loop_thread.run(fail())


def test_closing_cancels_what_still_runs(loop_thread):
    cancelled = threading.Event()
    started = threading.Event()
    errors = []

    async def wait_for_ever():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def call():
        try:
            loop_thread.run(wait_for_ever())
        except ClientClosedError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    started.wait(10)
    loop_thread.close()
    caller.join(10)
    assert cancelled.is_set()
    assert len(errors) == 1


@pytest.mark.usefixtures("no_collection")
def test_an_interrupt_ends_the_work_before_it_reaches_the_caller(loop_thread):
    """What the work used can then be closed: nothing is still inside it."""
    events = []

    async def work():
        try:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            events.append("ended")

    with pytest.raises(KeyboardInterrupt):
        loop_thread.run(work())
    assert events == ["ended"]


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("no_collection")
def test_an_interrupt_that_wakes_nobody_reaches_the_caller_too(loop_thread):
    async def work():
        _thread.interrupt_main()
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        loop_thread.run(work())


def test_a_forked_child_is_told_to_make_its_own(loop_thread, monkeypatch):
    """Its copy has no thread: waiting for it would never end."""
    loop_thread.run(answer())
    parent = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: parent + 1)
        assert not loop_thread.is_running
        with pytest.raises(ClientClosedError, match="forked"):
            loop_thread.run(answer())
    assert loop_thread.run(answer()) == "test"


def test_unused_work_is_closed(loop_thread):
    """A refused coroutine must not complain that it was never awaited."""
    loop_thread.close()
    work = answer()
    with pytest.raises(ClientClosedError):
        loop_thread.run(work)
    assert work.cr_frame is None


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_an_interrupt_on_the_way_to_the_work_ends_it_too(loop_thread, monkeypatch, is_scheduled):
    loop_thread.run(answer())
    schedule, num_calls = loop_thread._loop.call_soon_threadsafe, 0

    def interrupted(callback, *arguments):
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1 or is_scheduled:
            schedule(callback, *arguments)
        if num_calls == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop_thread._loop, "call_soon_threadsafe", interrupted)
    work = answer()
    with pytest.raises(KeyboardInterrupt):
        loop_thread.run(work)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
    assert loop_thread.run(answer()) == "test"
