"""`paceline replay`, and `paceline explain` of a file, by the scheduler's own program."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline_cli.failures import reported
from paceline_cli.supervisor.programs import ProgramMissingError

_MODULE = "paceline_scheduler"


def replay(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Files of the scheduler's --record-dir; one with --policy."),
    ],
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="JSON|FILE",
            help='Simulate other settings of the scheduler: {"itl_budget_s": 0.1}, or a file with this.',
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Where the picture goes, an SVG file; with --policy.")
    ] = None,
) -> None:
    """Repeat what a scheduler planned, and compare.

    Exit code 1 if a plan differs. With --policy, show what other settings would have done beside it.
    """
    options = () if policy is None else ("--policy", policy)
    run_recording_tool("replay", *map(str, files), *options, *(() if plot is None else ("--plot", str(plot))))


def run_recording_tool(*arguments: str) -> None:
    with reported():
        if importlib.util.find_spec(_MODULE) is None:
            raise ProgramMissingError(
                "recordings need the scheduler: in the checkout, pip install ./protos ./clients '.[scheduler]'"
            )
        command = (sys.executable, "-m", f"{_MODULE}.recording", *arguments)
        code = subprocess.run(command, check=False).returncode  # noqa: S603  this program, and what its user typed
    raise typer.Exit(code)
