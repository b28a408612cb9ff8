"""Foreign code and data, in a process of its own: what it breaks there costs nobody else anything.

The process, `confined_worker`, starts when it is needed and is replaced when it ended.
"""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from paceline_scheduler.api.text.confined_worker import LENGTH_BYTES, Message, framed
from paceline_scheduler.errors import QueueFullError

_MAX_ANSWER_BYTES = 256 * 1024 * 1024  # of each half
_RETRY_AFTER_S = 0.5
_NOT_IN_TIME = "it takes too long, or needs too much memory"
_EXIT_S = 0.5  # until an idle process ends
_POLL_S = 0.005


class ConfinedError(Exception):
    """What runs there cannot be set up, failed, took too long or needed too much."""


@dataclass(frozen=True, slots=True)
class Confinement:
    max_work_s: float = 2.0  # of a question, and of setting it up
    max_start_s: float = 10.0  # the process's own start included
    max_bytes: int = 512 * 1024 * 1024  # of address space


class _ProcessEndedError(Exception):
    """The process ended, or did not answer in time."""


class _Process:
    """Answers one message at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, module: str) -> "_Process":
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                reader, writer = await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
            try:
                # uvloop loses descriptors when too few are left to start a process.
                process = subprocess.Popen(  # noqa: ASYNC220, S603 (it returns when a process of ours has begun)
                    (sys.executable, "-P", "-m", module),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt typed at the terminal is for the scheduler
                )
            except BaseException:
                writer.close()
                raise
        return cls(process, reader, writer)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def ask(self, question: dict[str, Any], data: bytes, timeout_s: float) -> Message:
        """Raises _ProcessEndedError."""
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(framed(json.dumps(question).encode()))
                self._writer.write(framed(data))
                await self._writer.drain()
                answer: dict[str, Any] = json.loads(await self._read())
                return answer, await self._read()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, RuntimeError) as error:
            # RuntimeError is how uvloop says that a socket is closed.
            raise _ProcessEndedError from error

    async def _read(self) -> bytes:
        length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
        if length > _MAX_ANSWER_BYTES:
            raise _ProcessEndedError
        return await self._reader.readexactly(length)

    async def stop(self) -> None:
        self._writer.close()
        try:
            await self._end_within(_EXIT_S)
            self._process.kill()
            await self._end_within(_EXIT_S)
        finally:
            self._process.kill()
            self._process.wait()  # nothing outlives that signal

    async def _end_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.has_ended:  # noqa: ASYNC110 (the operating system has no event for it)
                    await asyncio.sleep(_POLL_S)


class Confined:
    """It starts when it is needed and is replaced when it ended. `name` is what it does, for errors."""

    def __init__(self, module: str, name: str, setup: dict[str, Any], data: bytes, confinement: Confinement) -> None:
        self._module = module
        self._name = name
        self._setup = {**setup, "max_work_s": confinement.max_work_s, "max_bytes": confinement.max_bytes}
        self._data = data
        self._confinement = confinement
        self._turn = asyncio.Lock()
        self._process: _Process | None = None
        self._setup_error: str | None = None
        self._is_closed = False

    async def ask(self, question: dict[str, Any], data: bytes = b"") -> Message:
        """Raises ConfinedError, and QueueFullError when no process can be started."""
        async with self._turn:
            process = await self._ready_process()
            # A process in an unknown state is not used again.
            self._process = None
            # It ends itself at max_work_s.
            answer = await _ask(process, question, data, 2 * self._confinement.max_work_s)
            if self._is_closed:
                await process.stop()
            else:
                self._process = process
        return answer

    async def close(self) -> None:
        """Who still waits gets a process of their own."""
        self._is_closed = True
        async with self._turn:
            if self._process is not None:
                await self._process.stop()
                self._process = None

    async def _ready_process(self) -> _Process:
        if self._process is not None and self._process.has_ended:
            await self._process.stop()
            self._process = None
        return self._process or await self._start()

    async def _start(self) -> _Process:
        if self._setup_error is not None:
            raise ConfinedError(self._setup_error)
        try:
            process = await _Process.start(self._module)
        except OSError as error:
            sentence = f"no process to {self._name} could be started: {error.strerror}"
            raise QueueFullError(sentence, _RETRY_AFTER_S) from error
        answer, _ = await _ask(process, self._setup, self._data, self._confinement.max_start_s)
        if answer:
            # It will not do the next time either.
            self._setup_error = str(answer["failed"])
            await process.stop()
            raise ConfinedError(self._setup_error)
        return process


async def _ask(process: _Process, question: dict[str, Any], data: bytes, timeout_s: float) -> Message:
    """Stops the process unless it answers."""
    try:
        return await process.ask(question, data, timeout_s)
    except BaseException as error:
        await process.stop()
        if isinstance(error, _ProcessEndedError):
            raise ConfinedError(_NOT_IN_TIME) from None
        raise
