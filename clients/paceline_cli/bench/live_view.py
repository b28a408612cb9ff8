"""How far a rung is, on a terminal; nothing elsewhere. Writes to stderr only."""

from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline_cli.bench.records import Counted, RequestFailure, RungRun


class LiveView(Protocol):
    def show(self, run: RungRun, now: float) -> None:
        """Show how far it is, by the clock's reading."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def make_live_view() -> LiveView:
    """A bar where stderr is a terminal, else nothing."""
    console = Console(stderr=True, highlight=False)
    return ProgressBar(console) if console.is_terminal else NoView()


class NoView:
    def show(self, run: RungRun, now: float) -> None:
        """Nobody looks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class ProgressBar:
    """One line that is drawn anew when it is told to, by no thread of its own, and is gone at the end."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._bar = self._progress.add_task("", state="")

    def show(self, run: RungRun, now: float) -> None:
        self._progress.update(
            self._bar,
            description=run.rung.load.label,
            total=len(run.rung.requests),
            completed=sum(record.outcome is not None for record in run.records),
            state=describe(run, now),
        )
        self._progress.refresh()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def describe(run: RungRun, now: float) -> str:
    num_running = sum(record.outcome is None for record in run.records)
    num_failed = sum(isinstance(record.outcome, RequestFailure) for record in run.records)
    num_tokens = sum(
        record.outcome.num_output_tokens if isinstance(record.outcome, Counted) else len(record.times)
        for record in run.records
    )
    rate = num_tokens / (now - run.started) if now > run.started else 0.0
    failed = f", {num_failed:,} failed" if num_failed else ""
    return f"{num_running:,} running{failed}, {rate:,.0f} tokens/s"
