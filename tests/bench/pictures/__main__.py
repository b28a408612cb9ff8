"""`make pictures`: take the figures of new runs where their files are named, and draw all pictures."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from pictures.drawing import draw_pauses, draw_throughput, draw_timeline
from pictures.figures import (
    load_pauses,
    load_screen,
    load_throughput,
    load_timeline,
    pauses_of,
    save,
    throughput_of,
    timeline_of,
)
from pictures.screens import draw_screen, take_screen
from side_by_side import results
from side_by_side.machine import describe_machine

FOLDER = Path(__file__).parent

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def main(
    side_by_side: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Results of `make bench` or `make bench-quick`.")
    ] = None,
    chaos: Annotated[Path | None, typer.Option(metavar="FILE", help="What `paceline chaos --json` wrote here.")] = None,
    top: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A running system, for the screen of `paceline top`.")
    ] = None,
    folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the pictures go.")] = FOLDER,
) -> None:
    """Draw the pictures of the documents from the data beside this program, after taking in new runs."""
    if side_by_side is not None:
        run = results.load(side_by_side)
        save(throughput_of(run))
        save(timeline_of(run))
    if chaos is not None:
        report = json.loads(chaos.read_text(encoding="utf-8"))
        day = datetime.fromtimestamp(chaos.stat().st_mtime, UTC)
        save(pauses_of(report, f"{day:%Y-%m-%d}, {describe_machine()}"))
    if top is not None:
        save(asyncio.run(take_screen(top, f"{datetime.now(UTC):%Y-%m-%d}, {describe_machine()}")))
    draw_screen(load_screen(), folder / "screen.svg")
    draw_throughput(load_throughput(), folder / "throughput.svg")
    draw_pauses(load_pauses(), folder / "pauses.svg")
    draw_timeline(load_timeline(), folder / "timeline.svg")


if __name__ == "__main__":
    app()
