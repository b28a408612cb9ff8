"""`paceline top`: what a scheduler and its executors do now."""

import asyncio
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from paceline_cli.config import DEFAULT_TARGET, AdminTargetOption, TargetOption, token_of
from paceline_cli.failures import reported
from paceline_cli.options import TlsDirOption, TokenFileOption, timeout_of, tls_of
from paceline_cli.top.screen import whole_screen
from paceline_cli.top.source import Source
from paceline_cli.top.state import TopState
from paceline_client.addresses import admin_target
from paceline_client.async_client import AsyncClient

_PIPE_WIDTH = 10_000  # where nobody looks no line is folded, so that a name can be found in it


def top(
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=60, help="How often the scheduler is asked.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print all that one interval shows, and end.")] = False,
    admin: AdminTargetOption = None,
    target: TargetOption = DEFAULT_TARGET,
    tls_dir: TlsDirOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Watch executors and requests, and act on them by keys.

    Where stdout is no terminal it prints everything and ends, as with --once. For operators, where there are tokens.
    """
    with reported():
        is_live = sys.stdin.isatty() and sys.stdout.isatty() and not once
        asyncio.run(_top(target, admin or admin_target(target), tls_dir, token_file, interval, is_live=is_live))


async def _top(
    target: str, admin: str, tls_dir: Path | None, token_file: Path | None, interval_s: float, *, is_live: bool
) -> None:
    state, tls, token = TopState(), tls_of(tls_dir), token_of(token_file)
    source = Source(admin, tls, token, state, time.monotonic)
    client = AsyncClient(target, tls=tls, token=token, timeout=timeout_of(None))
    try:
        await source.ask()
        if is_live:
            from paceline_cli.top.live import LiveScreen  # only now: what is printed once needs none of it

            await LiveScreen(state, source, client, interval_s).run()
        else:
            await asyncio.sleep(interval_s)
            await source.ask()
            is_terminal = sys.stdout.isatty()
            width = shutil.get_terminal_size().columns if is_terminal else _PIPE_WIDTH
            typer.echo(whole_screen(state, width, time.monotonic(), is_terminal=is_terminal))
    finally:
        await asyncio.gather(client.close(), source.close())
