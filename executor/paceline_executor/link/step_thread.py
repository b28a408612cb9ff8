"""The thread that steps run on, and what it waits for meanwhile.

Its work is a generator: it yields what it waits for and is sent the command that came, or None. So a simulation can run
it, turn by turn and in virtual time. Refuses to know steps.
"""

import queue
import threading
from collections.abc import Generator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

CommandT = TypeVar("CommandT")


@dataclass(frozen=True, slots=True)
class Wait:
    """The work goes on with a command that comes within so many seconds, or without one.

    None: it goes on without, and blocks the thread itself until the step has ended that `step` stands for. Where both
    are given, the step is why it cannot wait longer.
    """

    command_s: float | None
    step: object = None


@dataclass(frozen=True, slots=True)
class Pause:
    """The work goes on, without a command, when this is done or so many seconds have passed."""

    work: Future[Any]
    seconds: float


Work = Generator[Wait | Pause, CommandT | None, None]


class StepThread(Protocol[CommandT]):
    def start(self, work: Work[CommandT]) -> None: ...

    def put(self, command: CommandT) -> None: ...

    def join(self, timeout_s: float) -> bool: ...


class OwnThread(Generic[CommandT]):
    """A thread of its own, which loads the model too."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[CommandT] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Work[CommandT]) -> None:
        self._thread = threading.Thread(target=self._run, args=(work,), name="step", daemon=True)
        self._thread.start()

    def put(self, command: CommandT) -> None:
        self._commands.put(command)

    def join(self, timeout_s: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, work: Work[CommandT]) -> None:
        command: CommandT | None = None
        while True:
            try:
                wait = work.send(command)
            except StopIteration:
                return
            if isinstance(wait, Pause):
                command = None
                futures.wait((wait.work,), wait.seconds)
            else:
                command = None if wait.command_s is None else self._next(wait.command_s)

    def _next(self, seconds: float) -> CommandT | None:
        try:
            return self._commands.get(timeout=seconds) if seconds else self._commands.get_nowait()
        except queue.Empty:
            return None
