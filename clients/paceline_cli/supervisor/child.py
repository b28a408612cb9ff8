"""One process of a program: started under the launcher, listened to, ended.

Knows one process. Refuses to know whether it is started again.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from pathlib import Path

from paceline_cli.config import environment_with
from paceline_cli.supervisor.events import (
    BecameReady,
    ChildListener,
    FinishingRequests,
    Printed,
    Program,
    Progressed,
    Said,
    Started,
    TookOver,
)
from paceline_cli.supervisor.log_lines import Finishing, Level, LineSplitter, Progress, Ready, parse_line

_LAUNCHER = Path(__file__).with_name("launcher.py")
_STDOUT, _STDERR = 1, 2
# How the services say why they end.
_LAST_WORDS = re.compile(r"paceline-\S+: error: (.+)")
# How long to wait for what a process printed last; its own children may hold the pipes open for much longer.
_LAST_WORDS_SECONDS = 0.5


class Child:
    """A running process, made by `start_child`.

    It has a process group of its own, so that Ctrl-C in the terminal reaches the supervisor alone.
    """

    def __init__(
        self, transport: asyncio.SubprocessTransport, output: "_Output", *, leaves_children: bool = False
    ) -> None:
        self._transport = transport
        self._leaves_children = leaves_children
        self._output = output

    @property
    def process_id(self) -> int | None:
        """Its process id while it runs, None once it has ended."""
        return None if self._output.exited.is_set() else self._transport.get_pid()

    def last_error(self, exit_code: int) -> str | None:
        """Why it ended, in its own words, else the last error it logged, else the last line on its stderr.

        What it logged before a signal killed it is not the reason.
        """
        last_logged = self._output.last_logged_error if exit_code > 0 else None
        said = self._output.last_words or last_logged or self._output.last_stderr_line
        return None if said is None else self._output.retell(said)

    async def wait(self) -> int:
        """Its exit code, once it has ended and its output was read; negative for the signal that killed it."""
        await self._output.exited.wait()
        if not self._leaves_children:
            self._kill_group()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._output.closed.wait()
        exit_code = self._transport.get_returncode()
        self._transport.close()
        return exit_code if exit_code is not None else -signal.SIGKILL

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._transport.terminate()

    def kill(self) -> None:
        """End it now, with whatever it has started itself."""
        if not self._output.exited.is_set():
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)


class _Output(asyncio.SubprocessProtocol):
    """What a process prints, as events, and whether it has ended. Called by the event loop."""

    def __init__(self, program: Program, listener: ChildListener) -> None:
        self._name = program.name
        self.retell = program.retell
        self._listener = listener
        self._splitters = {_STDOUT: LineSplitter(), _STDERR: LineSplitter()}
        self._stands_by = False
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()
        self.last_words: str | None = None
        self.last_logged_error: str | None = None
        self.last_stderr_line: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: ARG002  asyncio's signature
        self._listener.on_event(Started(self._name))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        for line in self._splitters[fd].feed(data):
            self._take(line, fd)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002  asyncio's signature
        """It, or the last process that shares its output, closed a stream."""
        if fd in self._splitters:
            for line in self._splitters.pop(fd).end():
                self._take(line, fd)
        if not self._splitters:
            self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()

    def _take(self, raw: bytes, fd: int) -> None:
        self._listener.on_event(Printed(self._name, raw))
        # What libraries print on stderr is worth seeing, and seldom an error.
        line = parse_line(raw, Level.WARNING if fd == _STDERR else Level.INFO)
        match line:
            case Progress() if self._stands_by:
                pass  # it waits in the queue, which is what it is there for
            case Progress(phase, fraction):
                self._listener.on_event(Progressed(self._name, phase, fraction))
            case Ready(stands_by):
                took_over = self._stands_by and not stands_by
                self._stands_by = stands_by
                self._listener.on_event(TookOver(self._name) if took_over else BecameReady(self._name, stands_by))
            case Finishing(num_requests):
                self._listener.on_event(FinishingRequests(self._name, num_requests))
            case _ if line.text:
                if fd == _STDERR and (found := _LAST_WORDS.match(line.text)):
                    # It goes out with the end of the process, which it explains.
                    self.last_words = found[1]
                    return
                if fd == _STDERR:
                    self.last_stderr_line = line.text
                if line.level is Level.ERROR:
                    self.last_logged_error = line.text
                self._listener.on_event(Said(self._name, line.level, line.text))


async def start_child(program: Program, listener: ChildListener) -> Child:
    """Start a process of the program. Must be called on the main thread: the launcher says why."""
    launcher = (sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()))
    transport, output = await asyncio.get_running_loop().subprocess_exec(
        lambda: _Output(program, listener),
        *launcher,
        *program.command,
        stdin=asyncio.subprocess.DEVNULL,
        process_group=0,
        env=environment_with(program.environment),
    )
    return Child(transport, output, leaves_children=program.leaves_children)
