"""An event loop on a private daemon thread, and a way to call coroutines on it from any other thread.

Knows threads and forks. Refuses to know what it runs.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from paceline_client.errors import ClientClosedError

Answer = TypeVar("Answer")
_LOOK_SECONDS = 0.5
_JOIN_SECONDS = 5.0
_CANCEL_SECONDS = 5.0


class _LoopCall(Generic[Answer]):
    """The outcome comes when the work has really ended."""

    def __init__(self, work: Coroutine[Any, Any, Answer]) -> None:
        self._work = work
        self._task: asyncio.Task[Answer] | None = None
        self.outcome: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def start(self) -> None:
        """Called on the loop."""
        if self.outcome.done():
            return
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Called on the loop; before `start` when the caller was interrupted on the way there."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._work.close()
            self.outcome.set_exception(ClientClosedError("the call was interrupted before it began"))

    def _ended(self, task: asyncio.Task[Answer]) -> None:
        if task.cancelled():
            self.outcome.set_exception(ClientClosedError("the client was closed meanwhile"))
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class LoopThread:
    """Starts its thread at the first call, so that an object made before a fork can be used after it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process_id = 0
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Not before the first call, in a forked child, or on the thread itself."""
        thread = self._thread
        return thread not in (None, threading.current_thread()) and self._process_id == os.getpid()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """An interrupt of the caller cancels it. `ClientClosedError` after `close`."""
        call = _LoopCall(work)
        loop = None
        try:
            with self._lock:
                # Under the lock: what is begun before `close` is begun before the loop is told to stop.
                loop = self._started_loop()
                loop.call_soon_threadsafe(call.start)
            while not call.outcome.done():
                # By turns: an interrupt just before a wait does not end it.
                concurrent.futures.wait([call.outcome], timeout=_LOOK_SECONDS)
            return call.outcome.result()
        except BaseException:
            if loop is None:
                work.close()
            elif not call.outcome.done():
                # Ctrl-C: the work must not go on for nobody, and must have ended before what it used is touched again.
                loop.call_soon_threadsafe(call.cancel)
                concurrent.futures.wait([call.outcome], timeout=_CANCEL_SECONDS)
            raise

    def close(self) -> None:
        """Closing twice, or in a forked child, does nothing."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            if loop is None or thread is None or self._process_id != os.getpid():
                return
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        if self._is_closed:
            raise ClientClosedError("the client is closed")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(_ignore_spurious_wake_ups)
            self._process_id = os.getpid()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        if self._process_id != os.getpid():
            raise ClientClosedError("the client was used before this process was forked: make a new one here")
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_finish(asyncio.all_tasks(loop)))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _finish(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _ignore_spurious_wake_ups(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC wakes every loop of the process for one event; the ones that find nothing complain (grpc #25364)."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
