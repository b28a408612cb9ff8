"""An experiment while it runs: a live table where stderr is a terminal, a line per fault elsewhere."""

import signal
from collections import deque
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from paceline_cli.chaos.experiment import ExperimentObserver
from paceline_cli.chaos.ledger import UNDISTURBED, ChaosLedger, FaultWindow
from paceline_cli.chaos.tables import line_of, table_of
from paceline_cli.progress import BarView, LineView, ProgressView, describe
from paceline_cli.supervisor.events import ChildEvent, Exited

# Tokens per second are those of the latest so many frames.
_RATE_FRAMES = 4


class ChaosView(ExperimentObserver, Protocol):
    """Shows an experiment inside a `with` block. Writes to stderr only."""

    def show(self, now_s: float) -> None:
        """Draw the present state; called some times per second."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def make_chaos_view(num_faults: int | None) -> ChaosView:
    """`num_faults`: None where it is not known how many there will be."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        return TableView(console, num_faults)
    return FaultLines(console, num_faults)


class FaultLines:
    """A line per fault, and one whenever a process ends that nobody here killed."""

    def __init__(self, console: Console, num_faults: int | None) -> None:
        self._console = console
        self._starting: ProgressView | None = LineView(console)
        self._num_faults = num_faults
        self._num_settled = 0

    def on_event(self, event: ChildEvent) -> None:
        if self._starting is not None:
            self._starting.on_event(event)
        elif (line := unexpected(event)) is not None:
            self._console.print(line, markup=False)

    def on_loaded(self, ledger: ChaosLedger) -> None:  # noqa: ARG002  lines show what has settled
        self._starting = None

    def on_fault(self, window: FaultWindow) -> None:
        """Its line comes when its figures are known."""

    def on_settled(self, window: FaultWindow) -> None:
        self._num_settled += 1
        of = "" if self._num_faults is None else f"/{self._num_faults}"
        self._console.print(f"{self._num_settled}{of} {line_of(window)}", markup=False)

    def show(self, now_s: float) -> None:
        """Lines come when there is something to say."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class TableView:
    """Bars while processes start, then the table, drawn anew when it is told to, by no thread of its own."""

    def __init__(self, console: Console, num_faults: int | None) -> None:
        self._console = console
        self._bars = BarView(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._num_faults = num_faults
        self._ledger: ChaosLedger | None = None
        self._latest: FaultWindow | None = None
        self._rates: deque[tuple[float, int]] = deque(maxlen=_RATE_FRAMES)

    def on_event(self, event: ChildEvent) -> None:
        if self._ledger is None:
            self._bars.on_event(event)
        elif (line := unexpected(event)) is not None:
            self._console.print(line, markup=False)

    def on_loaded(self, ledger: ChaosLedger) -> None:
        self._bars.settle()
        self._ledger = ledger
        self._live.start()

    def on_fault(self, window: FaultWindow) -> None:
        self._latest = window

    def on_settled(self, window: FaultWindow) -> None:
        """Its figures are in the table already."""

    def show(self, now_s: float) -> None:
        if self._ledger is not None:
            self._live.update(self._frame(self._ledger, now_s), refresh=True)

    def __enter__(self) -> Self:
        self._bars.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.settle()
        self._live.stop()

    def _frame(self, ledger: ChaosLedger, now_s: float) -> RenderableType:
        num_tokens = sum(window.num_tokens for window in ledger.windows)
        self._rates.append((now_s, num_tokens))
        then_s, num_then = self._rates[0]
        rate = (num_tokens - num_then) / (now_s - then_s) if now_s > then_s else 0.0
        num_done = sum(window.num_done for window in ledger.windows)
        num_faults = sum(window.kind != UNDISTURBED for window in ledger.windows)
        of = "" if self._num_faults is None else f" of {self._num_faults}"
        status = Text.assemble(
            (f"\nfault {num_faults}{of}", "bold"),
            f"  {len(ledger.running)} streams running, {num_done:,} done, {rate:,.0f} tokens/s",
        )
        return Group(table_of(ledger.windows), status, self._last_words(ledger, now_s))

    def _last_words(self, ledger: ChaosLedger, now_s: float) -> Text:
        window = self._latest
        if window is None:
            return Text("watching what pauses look like when nothing happens", style="dim")
        what = f"{window.kind} {window.detail}, {now_s - window.began_s:.1f} s ago: "
        if window.settled_seconds is not None:
            return Text(f"{what}back after {window.settled_seconds:.1f} s", style="dim")
        return Text(f"{what}{ledger.num_waiting} streams wait for their next token", style="yellow")


def unexpected(event: ChildEvent) -> str | None:
    """The line for a process that ended though no fault here ended it; None for everything else."""
    if isinstance(event, Exited) and event.exit_code != -signal.SIGKILL:
        return f"{event.name}: {describe(event)}"
    return None
