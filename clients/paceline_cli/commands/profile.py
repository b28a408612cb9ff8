"""`paceline profile`: the next steps of an executor, as a file that ui.perfetto.dev shows."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated

import typer

from paceline_cli.config import DEFAULT_TARGET, AdminTargetOption, TargetOption, token_of
from paceline_cli.failures import print_error, reported
from paceline_cli.options import TlsDirOption, TokenFileOption, tls_of
from paceline_cli.top.source import Source
from paceline_cli.top.state import TopState
from paceline_cli.wire_profile import executor_addresses, trace_parts
from paceline_client.addresses import admin_target
from paceline_client.credentials import Credentials
from paceline_client.requests import invalid

_IDLE_SECONDS = 3.0
_STEP_MARKS = (b'"cat":"step"', b'"name": "ProfilerStep#')  # of the executor's own traces, and torch.profiler's


def profile(
    executor: Annotated[
        str | None, typer.Option("--executor", metavar="HOST:PORT", help="The executor; unset, the only one.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, max=1000, help="How many steps to record.")] = 20,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Unset, a name with the time of day.")
    ] = None,
    admin: AdminTargetOption = None,
    target: TargetOption = DEFAULT_TARGET,
    tls_dir: TlsDirOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Record the next steps of an executor, for ui.perfetto.dev.

    Steps come from requests: send some meanwhile. What was recorded until Ctrl-C is kept.
    """
    file = output or Path(time.strftime("paceline-profile-%Y%m%d-%H%M%S.json"))
    with reported():
        tls, token = tls_of(tls_dir), token_of(token_file)
        asked = executor or Source(admin or admin_target(target), tls, token, TopState(), time.monotonic)
        asyncio.run(_record(asked, steps, file, Credentials(tls, token)))


async def _record(executor: str | Source, num_steps: int, file: Path, credentials: Credentials) -> None:
    address = executor if isinstance(executor, str) else await _only_one(executor)
    trace = _TraceFile(file)
    try:
        async with contextlib.aclosing(trace_parts(address, num_steps, credentials)) as parts:
            async for part in _saying_when_idle(parts, address):
                trace.write(part)
    except asyncio.CancelledError:
        trace.close_early()
        raise
    except BaseException:
        trace.discard()
        raise
    trace.close()


async def _only_one(source: Source) -> str:
    """Raises InvalidRequestError, which names those there are."""
    try:
        addresses = await source.call(executor_addresses)
    finally:
        await source.close()
    if len(addresses) != 1:
        found = f"there are {', '.join(addresses)}" if addresses else "the scheduler has none"
        raise invalid("--executor", f"name one: {found}")
    return addresses[0]


async def _saying_when_idle(parts: AsyncGenerator[bytes, None], address: str) -> AsyncGenerator[bytes, None]:
    """The parts; once, that none with a step has come."""
    has_step = is_said = False
    coming = asyncio.ensure_future(anext(parts, None))
    try:
        while True:
            await asyncio.wait((coming,), timeout=None if has_step or is_said else _IDLE_SECONDS)
            if not coming.done():
                is_said = True
                typer.echo(f"{address} has shown no step yet: it is idle, or collects them; send requests", err=True)
                continue
            part = coming.result()
            if part is None:
                return
            has_step = has_step or _count_steps(part) > 0
            yield part
            coming = asyncio.ensure_future(anext(parts, None))
    finally:
        coming.cancel()
        await asyncio.wait((coming,))


class _TraceFile:
    """A trace that has its name once it is whole."""

    def __init__(self, file: Path) -> None:
        """Raises InvalidRequestError for a file that cannot be written."""
        self._file = file
        self._part = file.with_name(f"{file.name}.part")
        self._num_steps = 0
        try:
            self._stream = self._part.open("wb", buffering=0)
        except OSError as error:
            raise invalid("--output", f"cannot write {self._part}: {error.strerror}") from None

    def write(self, part: bytes) -> None:
        self._stream.write(part)
        self._num_steps += _count_steps(part)

    def close(self) -> None:
        self._stream.close()
        self._part.replace(self._file)
        typer.echo(f"{self._num_steps} steps in {self._file}: open it at https://ui.perfetto.dev")

    def close_early(self) -> None:
        """Keep what has come, if a trace can be made of it: of one that comes only when it is whole that is nothing."""
        self._stream.write(b"\n]}\n")
        self._stream.close()
        try:
            json.loads(self._part.read_bytes())
        except (ValueError, RecursionError):
            self._part.unlink()
            print_error("interrupted before the trace had come; nothing was written")
            return
        self.close()

    def discard(self) -> None:
        self._stream.close()
        self._part.unlink()


def _count_steps(part: bytes) -> int:
    return sum(part.count(mark) for mark in _STEP_MARKS)
