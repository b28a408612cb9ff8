"""The results of an experiment for people: one table, and what went wrong in words. Times are in seconds."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline_cli.chaos.ledger import UNDISTURBED, ChaosLedger, FaultWindow
from paceline_cli.chaos.report import KindFigures, Spread, figures_by_kind, figures_of

_MISSING = "-"
_COLUMNS = ("faults", "streams", "p50", "p99", "max", "later", "back", "failed", "lost", "doubled", "changed")
LEGEND = (
    "streams: delivering when a fault came. p50, p99, max: their pauses at the fault, begun within 0.2 s, in s.\n"
    "later: the longest pause of each until the next fault, whatever its cause, p99.\n"
    "back: until all of them had got something and every process was there again, p50 in s."
)


def table_of(windows: Sequence[FaultWindow]) -> Table:
    """A row per kind of fault, and one for all of them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
    rows = figures_by_kind(windows)
    for figures in rows:
        table.add_row(*_cells(figures))
    if len(rows) > 1:
        faults = [window for window in windows if window.kind != UNDISTURBED]
        table.add_section()
        table.add_row(*_cells(figures_of("all faults", faults)))
    return table


def print_summary(console: Console, ledger: ChaosLedger) -> None:
    console.print()
    console.print(table_of(ledger.windows))
    console.print(f"\n{LEGEND}\n", markup=False, style="dim")
    console.print(verdict_of(ledger.windows), markup=False)
    for figures in figures_by_kind(ledger.windows):
        if figures.executor_ends is not None:
            console.print(f"{figures.kind}: {_ends(figures.executor_ends)}", markup=False)
    for line in _troubles(ledger):
        console.print(line, markup=False)


def verdict_of(windows: Sequence[FaultWindow]) -> str:
    total = figures_of("", windows)
    return (
        f"{total.num_faults:,} faults, {total.num_done:,} streams compared to their ends, {total.num_tokens:,} tokens: "
        f"{total.num_failed:,} failed, {total.mismatches.num_lost:,} lost, {total.mismatches.num_doubled:,} doubled, "
        f"{total.mismatches.num_changed:,} changed."
    )


def line_of(window: FaultWindow) -> str:
    figures = figures_of(window.kind, [window])
    words = [f"{window.kind} {window.detail}:", f"{window.num_in_flight} streams,"]
    if figures.stall is not None:
        words.append(f"stall p50 {_seconds(figures.stall.p50)} max {_seconds(figures.stall.longest)} s,")
    settled = window.settled_seconds
    words.append("not back in time" if settled is None else f"back after {_seconds(settled)} s")
    if window.num_failed:
        words.append(f", {window.num_failed} failed")
    if window.mismatches:
        words.append(f", {window.mismatches.num_lost} lost, {window.mismatches.num_doubled} doubled")
        words.append(f", {window.mismatches.num_changed} changed")
    return " ".join(words).replace(" ,", ",")


def _cells(figures: KindFigures) -> list[Text]:
    return [
        Text(figures.kind),
        Text(f"{figures.num_faults:,}" if figures.num_faults else _MISSING),
        Text(f"{figures.num_stalls:,}"),
        *(Text(cell) for cell in _spread(figures.stall)),
        Text(_spread(figures.longest)[1]),
        Text(_seconds(figures.settled.p50) if figures.settled is not None else _MISSING),
        *(_count(number) for number in (figures.num_failed, figures.mismatches.num_lost)),
        *(_count(number) for number in (figures.mismatches.num_doubled, figures.mismatches.num_changed)),
    ]


def _spread(spread: Spread | None) -> tuple[str, str, str]:
    if spread is None:
        return _MISSING, _MISSING, _MISSING
    return _seconds(spread.p50), _seconds(spread.p99), _seconds(spread.longest)


def _ends(spread: Spread) -> str:
    return f"executors of several ranks ended after {' / '.join(_spread(spread))} s"


def _seconds(value: float) -> str:
    return f"{value:,.2f}"


def _count(number: int) -> Text:
    return Text(f"{number:,}", style="bold red" if number else "green")


def _troubles(ledger: ChaosLedger) -> list[str]:
    total = figures_of("", ledger.windows)
    troubles = [f"failed: {count:,} streams with {reason}" for reason, count in sorted(total.failures.items())]
    if ledger.first_failure is not None:
        troubles.append(f"the first that failed was {ledger.first_failure}")
    if total.mismatches.first is not None:
        troubles.append(f"the first that was wrong was {total.mismatches.first}")
    troubles += [f"a metric is untrue: {sentence}" for sentence in total.untrue]
    if total.num_left:
        troubles.append(f"{total.num_left:,} processes were left of executors that had ended, seconds later")
    if total.num_unsettled:
        troubles.append(f"after {total.num_unsettled:,} faults the system was not whole again in time")
    return troubles
