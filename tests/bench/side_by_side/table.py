"""The table of a run, for a terminal and for MEASURED.md, and its last line."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from side_by_side.comparison import Outcome
from side_by_side.engines import OURS
from side_by_side.results import EngineFacts, Results

HEAD = ("", "ours", "best peer", "ratio", "target", "of the limit", "")
_NOT_MEASURED = "-"


def print_table(outcomes: Sequence[Outcome], results: Results, console: Console) -> None:
    """Print the table, what stands behind its names, and `reached N of M`."""
    limits = results.best_limits
    table = Table(title=f"{results.date}, {results.machine}", caption_justify="left")
    for number, title in enumerate(HEAD):
        table.add_column(title, justify="right" if number in (1, 3, 4, 5) else "left")
    for each in outcomes:
        table.add_row(*cells(each, results))
    console.print(table)
    if limits:
        console.print(
            f"limits, 2 threads: {limits.read_gb_per_s:.1f} GB/s read, {limits.int8_gop_per_s:.0f} int8 GOP/s, "
            f"{limits.float32_gflop_per_s:.0f} float32 GFLOP/s"
        )
    for facts in results.engines.values():
        console.print(describe(facts), highlight=False, soft_wrap=True)
    console.print(last_line(outcomes), highlight=False)


def cells(outcome: Outcome, results: Results) -> tuple[str, ...]:
    row = outcome.row
    ratio = _NOT_MEASURED if outcome.ratio is None else _factor(outcome.ratio)
    limit = _NOT_MEASURED if outcome.limit_share is None else f"{outcome.limit_share:.0%}"
    remark = "not measured" if outcome.ratio is None else "reached" if outcome.is_reached else "not reached"
    return (
        row.name,
        _number(outcome.ours, row.unit),
        _best(outcome, results),
        ratio,
        f"{row.bound.value} {_factor(row.target)}",
        limit,
        f"{remark}, disturbed" if outcome.is_disturbed else remark,
    )


def last_line(outcomes: Sequence[Outcome]) -> str:
    return f"reached {sum(outcome.is_reached for outcome in outcomes)} of {len(outcomes)}"


def describe(facts: EngineFacts) -> str:
    """What an engine is and how it was driven, or why not."""
    if not facts.version:
        return f"{facts.name}: not available: {facts.problem}" if facts.problem else f"{facts.name}: not started"
    described = f"{facts.name} {facts.version}, {facts.harness}: {facts.configuration}"
    return f"{described}; then {facts.problem}" if facts.problem else described


def _best(outcome: Outcome, results: Results) -> str:
    if not outcome.best:
        return _NOT_MEASURED
    figure = _number(outcome.theirs, outcome.row.unit)
    if outcome.best == OURS:
        return f"{figure} (itself)"
    facts = results.engines.get(outcome.best)
    harness = f", {facts.harness}" if facts else ""
    return f"{figure} ({outcome.best}{harness})"


def _number(number: float | None, unit: str) -> str:
    if number is None:
        return _NOT_MEASURED
    text = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{text} {unit}".strip()


def _factor(ratio: float) -> str:
    return f"{ratio:.4g}"
