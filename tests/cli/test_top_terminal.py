"""`paceline top` on a terminal of its own, against real processes: what it shows, what its keys do, where it looks."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import asynccontextmanager, suppress

import pyte
import pytest
from typer.testing import CliRunner

from edge_rig.edge_server import serve_edge
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tokenizers import served_model
from paceline_cli.app import app
from paceline_client import AsyncClient, FinishReason, Stopping
from paceline_client.testing import FakeServer, say
from paceline_scheduler.backend import ExecutorStatus
from paceline_scheduler.observers.steps import StepTotals
from service_processes.measured import scheduler_of, simulated_executor

PACELINE = (sys.executable, "-m", "paceline_cli")
UP, HOME, END, ESCAPE, BACKSPACE = "\x1b[A", "\x1b[H", "\x1b[F", "\x1b", "\x7f"
COLOURS = re.compile(rb"\x1b\[[0-9;]*(?:3[0-7]|38;[0-9;]+)m")
PATIENCE_S = 60
LONG = Stopping(max_tokens=2000)  # of 100 ms each


class TopTerminal:
    """The command on a terminal, and what that shows."""

    def __init__(self, *arguments, environment=None):
        self._screen = pyte.Screen(80, 24)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, theirs = pty.openpty()
        self._set_size(80, 24)
        self.written = b""
        self.process = subprocess.Popen(
            [*PACELINE, "top", "--interval", "0.2", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm-256color", **(environment or {})},
        )
        os.close(theirs)
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def _set_size(self, columns, lines):
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns, lines):
        self._screen.resize(lines, columns)
        self._set_size(columns, lines)
        self.process.send_signal(signal.SIGWINCH)

    def _read(self):
        with suppress(OSError):
            data = os.read(self._ours, 65536)
            self.written += data
            self._stream.feed(data)

    @property
    def lines(self):
        """What stands on the screen."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def selected(self):
        """The line that is marked."""
        return next((line for line in self.lines if line.startswith(">")), "")

    def press(self, keys):
        os.write(self._ours, keys.encode())

    async def until(self, is_shown):
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not is_shown(self.lines):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail("\n".join(["never shown; there was:", *self.lines]))

    async def until_shown(self, pattern):
        """Wait until a line has it; returns that line."""
        await self.until(lambda lines: any(re.search(pattern, line) for line in lines))
        return next(line for line in self.lines if re.search(pattern, line))

    async def ended(self):
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), PATIENCE_S)

    def close(self):
        asyncio.get_running_loop().remove_reader(self._ours)
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@asynccontextmanager
async def terminal(*arguments, environment=None):
    """`paceline top` until the block ends."""
    top = TopTerminal(*arguments, environment=environment)
    try:
        yield top
    finally:
        top.close()


@asynccontextmanager
async def scripted(executor="10.0.0.1:50061"):
    """A scheduler of one executor in this process, without requests; yields where both of its services are."""
    backend = ScriptedBackend(served_model())
    steps = StepTotals(num_steps=9)
    backend.known_executors = (
        ExecutorStatus(executor, 3, 7, 2, "tiny", 1, 100, 60, 10, 30, 0, 3, 4, 2, "", steps, None, 16),
    )
    async with serve_edge(backend) as server:
        yield server.address


async def streaming(client, request_id):
    """Ask for an answer that takes long; returns once it runs."""
    stream = client.stream("Hello", stopping=LONG, request_id=request_id)
    await anext(stream)
    return stream


async def test_top_shows_a_running_system_and_changes_it():
    """Two requests run and one waits. One is explained and cancelled, the executor drained and used again, a bound
    changed; then the terminal changes its size.
    """
    async with (
        simulated_executor("--max-num-seqs", "2", step_ms=100.0) as executor,
        scheduler_of(executor, "--ttft-budget", "1e6") as (_, ports),
        AsyncClient(api(ports)) as client,
        terminal("--target", api(ports), "--admin-target", admin(ports)) as top,
    ):
        streams = [await streaming(client, f"running-{number}") for number in range(2)]
        waiting = asyncio.create_task(client.generate("Hi", stopping=LONG, request_id="waiting-1"))
        await top.until_shown("live$")
        await top.until_shown("^running 2  waiting 1 ")
        await top.until_shown(rf"^ {re.escape(executor)} +ready +2/2 +[0-9.]+ +[0-9.]+ ")
        await top.until_shown("^ waiting-1 .* waiting .* every row of ")
        await top.until_shown("between tokens p50 [0-9.]+ p99 [0-9.]+$")
        assert COLOURS.findall(top.written)

        for kinds in ({"waiting-1"}, {"running-0", "running-1"}, {"waiting-1", "running-0", "running-1"}):
            top.press("s")
            await top.until(lambda lines, kinds=kinds: set(re.findall(r"^ (\w+-\d) ", "\n".join(lines), re.M)) == kinds)
        top.press(END)
        await top.until_shown("^>waiting-1")
        top.press("e")
        await top.until_shown("^waits for: every row of .* ahead of it")
        top.press(UP)
        await top.until(lambda _: top.selected.startswith(">running-"))
        cancelled = int(top.selected[len(">running-")])
        top.press("d")
        await top.until_shown("^Select an executor first, with up and down")
        top.press("c")
        await top.until_shown(f"^Cancel the request running-{cancelled}")
        top.press("y")
        await top.until_shown("^running-. was cancelled")
        assert (await streams[cancelled].collect()).finish_reason is FinishReason.CANCELLED
        await top.until_shown("^.waiting-1 .* running ")

        top.press(HOME)
        await top.until_shown(rf"^>{re.escape(executor)}")
        top.press("e")
        await top.until_shown("^Select a request first, with up and down")
        top.press("d")
        await top.until_shown("^Place nothing new on ")
        top.press("n")
        await top.until_shown("^Nothing was changed")
        top.press("dy")
        await top.until_shown("is being drained; requests still there: 2")
        await top.until_shown(rf"^>{re.escape(executor)} +draining ")
        top.press("uy")
        await top.until_shown(rf"^>{re.escape(executor)} +ready ")

        await takes_a_number(top)
        await follows_its_size(top)
        top.press("q")
        assert await top.ended() == 0
        await asyncio.gather(client.cancel("waiting-1"), *(stream.aclose() for stream in streams))
        await waiting


async def takes_a_number(top):
    top.press("l")
    await top.until_shown("^1: max_num_queued_reqs = 1,024")
    top.press("2")
    await top.until_shown(r"^max_num_queued_tokens = _ ")
    top.press(ESCAPE + "18")
    await top.until_shown(r"^max_num_queued_reqs = 8_ ")
    top.press(f"q{BACKSPACE}7\r")
    await top.until_shown("^1: max_num_queued_reqs = 7$")


async def follows_its_size(top):
    """Its first and its last line are those of the terminal, whatever its size; a row that has room is there."""
    top.press("\x1b")
    for columns, lines in ((120, 40), (40, 12), (80, 24)):
        top.resize(columns, lines)
        await top.until(
            lambda shown, count=lines: (
                len(shown) == count and shown[0].startswith("paceline top") and shown[-1].startswith("q quit")
            )
        )
        await top.until_shown("^ waiting-1 .* running " if columns > 40 else "^ EXECUTOR")


async def test_top_writes_no_colours_where_nobody_wants_any():
    """SIGTERM ends it as q does, with the terminal as it was."""
    async with scripted() as address, terminal("--admin-target", address, environment={"NO_COLOR": "1"}) as top:
        await top.until_shown("live$")
        assert not COLOURS.findall(top.written)
        top.process.send_signal(signal.SIGTERM)
        assert await top.ended() == 0
        await top.until(lambda _: b"\x1b[?1049l" in top.written)


async def printed(*options):
    """What the command prints where there is no terminal, in a thread of this process."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["top", "--interval", "0.1", *options])


async def test_top_prints_everything_once_where_there_is_no_terminal():
    """Without colours and keys; no line is folded, so that a name is found in it."""
    name = "executor-0." + "a" * 90 + ":50061"
    async with scripted(name) as address:
        result = await printed("--admin-target", address)
    lines = result.stdout.splitlines()
    assert (result.exit_code, lines[0], lines[-1]) == (0, f"paceline top  {address}  live", " no requests")
    assert [line for line in lines if line.startswith(f" {name} ready")]
    assert "\x1b" not in result.stdout


async def test_a_port_that_is_no_admin_port_is_named():
    """With what to say instead; a failure is a line and an exit code."""
    with FakeServer(say("hi")) as server:
        result = await printed("--once", "--admin-target", server.target)
    assert (result.exit_code, len(result.stderr.splitlines())) == (os.EX_UNAVAILABLE, 1)
    assert f"{server.target} is not the admin port of a scheduler of this version: say --admin-target" in result.stderr


def api(ports):
    return f"127.0.0.1:{ports['port']}"


def admin(ports):
    return f"127.0.0.1:{ports['admin_port']}"
