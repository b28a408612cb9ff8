"""Shows how children come up: bars on a terminal, lines elsewhere. Writes to stderr only."""

from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from paceline_cli.supervisor.events import (
    BecameReady,
    ChildEvent,
    Exited,
    Progressed,
    Said,
    Started,
    StillRunning,
    TookOver,
    describe_exit,
)
from paceline_cli.supervisor.log_lines import Level

_LINE_STEP = 0.25
# A bar that is full is ticked off and its clock stops; of a child that is not ready yet it never is.
_NEARLY_ALL = 0.999


class ProgressView(Protocol):
    """Hears what the children do, and shows it inside a `with` block."""

    def on_event(self, event: ChildEvent) -> None:
        """Show it."""

    def settle(self) -> None:
        """Everything is ready: from now on only what is unusual is shown."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def make_view() -> ProgressView:
    """Bars where stderr is a terminal, else lines."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return BarView(console) if console.is_terminal else LineView(console)


class _Furthest:
    """Keeps what a child has done of something from going back: it may do a part of it again."""

    def __init__(self) -> None:
        self._fractions: dict[tuple[str, str], float] = {}

    def seen(self, event: ChildEvent) -> ChildEvent:
        """The event, with the largest fraction so far of the same activity since the child was started."""
        if isinstance(event, Started):
            self._fractions = {key: value for key, value in self._fractions.items() if key[0] != event.name}
        if not isinstance(event, Progressed) or event.fraction is None:
            return event
        key = event.name, event.phase.partition(" (")[0]
        self._fractions[key] = max(self._fractions.get(key, 0.0), event.fraction)
        return Progressed(event.name, event.phase, self._fractions[key])


class LineView:
    """One line whenever a child begins something else, and at each quarter of it; none of these twice."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, set[tuple[str, int]]] = {}
        self._furthest = _Furthest()

    def on_event(self, event: ChildEvent) -> None:
        event = self._furthest.seen(event)
        if isinstance(event, Started):
            self._shown.pop(event.name, None)
        if isinstance(event, Progressed):
            self._show_progress(event)
        elif (text := describe(event)) is not None:
            self._console.print(f"{event.name}: {text}", markup=False)

    def settle(self) -> None:
        """Lines need no end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def _show_progress(self, event: Progressed) -> None:
        line = event.phase, int((event.fraction or 0.0) / _LINE_STEP)
        shown = self._shown.setdefault(event.name, set())
        if line not in shown:
            if event.fraction is None:
                shown.clear()
            shown.add(line)
            percent = "" if event.fraction is None else f" {event.fraction:4.0%}"
            self._console.print(f"{event.name}: {event.phase}{percent}", markup=False)


class BarView:
    """A bar per child until all are ready, then lines."""

    def __init__(self, console: Console) -> None:
        self._lines = LineView(console)
        self._is_settled = False
        self._furthest = _Furthest()
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.fields[child]}"),
            BarColumn(bar_width=16),
            # Cut rather than wrapped: a bar stays on its line in a terminal of 80 columns.
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            TimeElapsedColumn(),
            console=console,
            expand=True,
        )

    def on_event(self, event: ChildEvent) -> None:
        if self._is_settled:
            self._lines.on_event(event)
            return
        match self._furthest.seen(event):
            case Started(name):
                if name in self._bars:  # it was ready once
                    self._progress.reset(self._bars[name])
                self._move(name, "starting", None)
            case Progressed(name, phase, fraction):
                self._move(name, phase, None if fraction is None else min(fraction, _NEARLY_ALL))
            case BecameReady(name, stands_by):
                self._move(name, "ready, stands by" if stands_by else "ready", 1.0)
            case TookOver(name):
                self._move(name, "ready", 1.0)
            case _:
                self._lines.on_event(event)

    def settle(self) -> None:
        self._is_settled = True
        self._progress.stop()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _move(self, name: str, phase: str, fraction: float | None) -> None:
        if name not in self._bars:
            self._bars[name] = self._progress.add_task("", total=None, child=name)
        # A bar without a total is drawn as busy without saying how far.
        total = None if fraction is None else 1.0
        self._progress.update(self._bars[name], description=phase, total=total, completed=fraction or 0.0)


def describe(event: ChildEvent) -> str | None:
    """An event in words; None for what is not worth a line."""
    match event:
        case Started():
            return "starting"
        case BecameReady(_, stands_by):
            return "ready, and stands by for the other" if stands_by else "ready"
        case TookOver():
            return "took over, and serves now"
        case StillRunning(_, seconds, num_requests):
            return f"{_what_runs(num_requests)}, for {seconds:.0f} s at most"
        case Said(_, level, text):
            return text if level >= Level.WARNING else None
        case Exited(_, exit_code, error, pause) if pause is not None:
            why = f" ({error})" if error else ""
            when = f"in {pause:.1f} s" if pause > 0 else "now"
            return f"{describe_exit(exit_code)}{why}; starting it again {when}"
    # What a process prints is shown where it means something, and an end for good is an error of the whole command.
    return None


def _what_runs(num_requests: int) -> str:
    if num_requests == 0:
        return "still finishing what it runs"
    return "1 request still runs" if num_requests == 1 else f"{num_requests:,} requests still run"
