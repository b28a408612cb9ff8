"""Keeps several programs running until told to stop, and ends them in order.

Knows processes and the restart rule. Refuses to know what the programs are for.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Self, TypeVar

from paceline_cli.supervisor.child import Child, start_child
from paceline_cli.supervisor.events import (
    BecameReady,
    ChildEvent,
    ChildListener,
    Exited,
    FinishingRequests,
    Program,
    StillRunning,
    describe_exit,
)
from paceline_cli.supervisor.restart_policy import GiveUp, RestartPolicy

Answer = TypeVar("Answer")
# It is said that a process still runs after the first, and then each of the second.
_FIRST_WORD_SECONDS = 1.0
_WORD_SECONDS = 5.0


class Restarts(Enum):
    ALWAYS = "always"
    """It is started again by the rule of `RestartPolicy`."""
    NEVER = "never"
    """It has failed."""


class ChildFailedError(Exception):
    """A program ended and is not started again. The message is its own last error."""

    def __init__(self, name: str, exit_code: int, last_error: str | None) -> None:
        how = f"{name} {describe_exit(exit_code)}"
        super().__init__(f"{how}: {last_error}" if last_error else how)
        self.exit_code = exit_code


class Supervisor:
    """Runs programs inside an `async with` block, on the main thread.

    At the end of the block the programs are asked to end and waited for, one `Program.stop_stage` after another; one
    that takes longer than `grace_seconds` is killed.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        listener: ChildListener,
        *,
        restarts: Restarts,
        grace_seconds: float,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._listener = listener
        self._is_stopping = asyncio.Event()
        self._slots = [_Slot(program, listener, restarts, self._is_stopping) for program in programs]
        self._slot_of = {slot.name: slot for slot in self._slots}
        self._tasks: dict[_Slot, asyncio.Task[None]] = {}

    async def ready(self) -> None:
        """Return when every program has become ready. `ChildFailedError` when one will not."""
        await self.during(_all_of([slot.became_ready for slot in self._slots]))

    async def forever(self) -> None:
        """Never return. `ChildFailedError` when a program ended for good."""
        await self.during(asyncio.Event().wait())

    async def during(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Do some work while the programs run. `ChildFailedError` interrupts it when one ended for good."""
        task = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait([task, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {task}:
                ended.result()
            return await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def process_id(self, name: str) -> int | None:
        """The id of the process that runs a program now; None while none does. KeyError for an unknown name."""
        return self._slot_of[name].process_id

    @property
    def unfinished(self) -> ChildFailedError | None:
        """After the block: the first program that had been ready and did not end in order. What it ran was given up."""
        return next((slot.failed_to_finish for slot in self._slots if slot.failed_to_finish is not None), None)

    def kill(self) -> None:
        """End every process at once; the end of the block then comes soon."""
        for slot in self._slots:
            slot.kill()

    async def __aenter__(self) -> Self:
        self._tasks = {slot: asyncio.create_task(slot.keep()) for slot in self._slots}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        self._is_stopping.set()
        try:
            for number in sorted({slot.stop_stage for slot in self._slots}):
                stage = [slot for slot in self._slots if slot.stop_stage == number]
                for slot in stage:
                    slot.terminate()
                await self._wait_for_end(stage)
                for slot in stage:
                    slot.kill()
        finally:
            self.kill()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _wait_for_end(self, stage: Sequence["_Slot"]) -> None:
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._grace_seconds, _FIRST_WORD_SECONDS
        while running := [slot for slot in stage if not self._tasks[slot].done()]:
            left = deadline - loop.time()
            if left <= 0:
                return
            tasks = [self._tasks[slot] for slot in running]
            await asyncio.wait(tasks, timeout=min(pause, left), return_when=asyncio.FIRST_COMPLETED)
            if not any(task.done() for task in tasks):
                pause = _WORD_SECONDS
                for slot in running:
                    self._listener.on_event(
                        StillRunning(slot.name, max(deadline - loop.time(), 0.0), slot.num_requests)
                    )


@dataclass(frozen=True, slots=True)
class _Exit:
    exit_code: int
    last_error: str | None


class _Slot:
    """One program's place: the process that fills it now, and when the next one does."""

    def __init__(
        self, program: Program, listener: ChildListener, restarts: Restarts, is_stopping: asyncio.Event
    ) -> None:
        self._program = program
        self._listener = listener
        self._restarts = restarts
        self._is_stopping = is_stopping
        self._policy = RestartPolicy()
        self._child: Child | None = None
        self.became_ready = asyncio.Event()
        self.failed_to_finish: ChildFailedError | None = None
        self.num_requests = 0  # that it finishes before it ends

    @property
    def name(self) -> str:
        return self._program.name

    @property
    def stop_stage(self) -> int:
        return self._program.stop_stage

    @property
    def process_id(self) -> int | None:
        return None if self._child is None else self._child.process_id

    async def keep(self) -> None:
        """Start the program again and again, until told to stop. `ChildFailedError` when it is given up."""
        while not self._is_stopping.is_set():
            exited = await self._run_once()
            if not self._is_stopping.is_set():
                await self._pause_after(exited)
            elif exited.exit_code != 0 and self.became_ready.is_set():
                self.failed_to_finish = ChildFailedError(self.name, exited.exit_code, exited.last_error)

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def on_event(self, event: ChildEvent) -> None:
        """Tell whoever listens, and note when the program is ready."""
        self._listener.on_event(event)
        if isinstance(event, FinishingRequests):
            self.num_requests = event.num_requests
        if isinstance(event, BecameReady):
            self._policy.became_ready(time.monotonic())
            self.became_ready.set()

    async def _run_once(self) -> _Exit:
        try:
            child = self._child = await start_child(self._program, self)
        except OSError as error:
            return _Exit(os.EX_OSERR, f"it cannot be started: {error.strerror}")
        if self._is_stopping.is_set():
            # Nobody asked it to end, for it was not there yet; and it has nothing to finish.
            child.kill()
        exit_code = await child.wait()
        return _Exit(exit_code, child.last_error(exit_code))

    async def _pause_after(self, exited: _Exit) -> None:
        now = time.monotonic()
        verdict = self._policy.exited(exited.exit_code, now)
        if isinstance(verdict, GiveUp) or self._restarts is Restarts.NEVER:
            self._listener.on_event(Exited(self._program.name, exited.exit_code, exited.last_error, None))
            raise ChildFailedError(self._program.name, exited.exit_code, exited.last_error)
        pause = max(verdict.seconds - now, self._program.min_restart_seconds)
        self._listener.on_event(Exited(self._program.name, exited.exit_code, exited.last_error, pause))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._is_stopping.wait()


async def _all_of(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()
