"""A benchmark's results for people: a table per rung, and one over all rungs."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from paceline_cli.bench.metrics import LatencyStatistics, Summary

_MISSING = "-"


def print_rung(console: Console, label: str, summary: Summary) -> None:
    console.print(f"\n{label}: {summary.num_completed:,} requests in {summary.duration_seconds:.1f} s", style="bold")
    table = Table(box=None, pad_edge=False)
    table.add_column("ms")
    for name in ("mean", "median", "p90", "p99"):
        table.add_column(name, justify="right", min_width=9)
    for name, statistics in (
        ("time to first token (TTFT)", summary.ttft),
        ("time per output token (TPOT)", summary.tpot),
        ("gap between messages (ITL)", summary.itl),
        ("whole request (E2E)", summary.e2el),
        ("sent late by", summary.late),
    ):
        if statistics is not None:
            table.add_row(name, *(_number(value) for value in _shown(statistics)))
    console.print(table)
    for line in _lines(summary):
        console.print(line, markup=False)


def print_ladder(console: Console, rungs: Sequence[tuple[str, Summary]]) -> None:
    """One row per rung, with what each of them can be compared by."""
    table = Table(box=None, pad_edge=False, title="\nmedian / p99 in ms", title_justify="left")
    columns = ["", "req/s", "out tok/s", "TTFT", "TPOT", "ITL", "failed"]
    has_goodput = any(summary.goodput_share is not None for _, summary in rungs)
    has_cost = any(summary.cost_per_million_output_tokens is not None for _, summary in rungs)
    for name in [*columns, *["goodput"] * has_goodput, *["cost/M out"] * has_cost]:
        table.add_column(name, justify="right" if name else "left")
    for label, summary in rungs:
        table.add_row(
            label,
            _number(summary.request_throughput, 2),
            _short(summary.output_throughput),
            *(_median_and_p99(statistics) for statistics in (summary.ttft, summary.tpot, summary.itl)),
            f"{summary.num_failed:,}",
            *[_percent(summary.goodput_share)] * has_goodput,
            *[_number(summary.cost_per_million_output_tokens, 3)] * has_cost,
        )
    console.print(table)


def _lines(summary: Summary) -> Iterator[str]:
    yield (
        f"{summary.request_throughput:,.2f} requests/s, {summary.output_throughput:,.1f} output tokens/s "
        f"(best second {summary.max_output_tokens_per_s:,.0f}), "
        f"{summary.total_token_throughput:,.1f} tokens/s with the prompts"
    )
    if summary.num_cached_tokens:
        share = summary.num_cached_tokens / summary.num_input_tokens
        yield f"{_percent(share)} of the prompt tokens came from the prefix cache"
    if summary.num_draft_tokens:
        share = summary.num_accepted_draft_tokens / summary.num_draft_tokens
        num_turns = max(1, summary.num_output_tokens - summary.num_accepted_draft_tokens)
        each = summary.num_output_tokens / num_turns
        yield f"{_percent(share)} of the drafts became output: {each:.2f} tokens per request and step"
    if summary.request_goodput is not None:
        yield f"goodput: {_percent(summary.goodput_share)} of the requests, {summary.request_goodput:,.2f} requests/s"
    if summary.cost_per_million_output_tokens is not None:
        yield (
            f"cost per million tokens: {_number(summary.cost_per_million_output_tokens, 3)} counting output tokens, "
            f"{_number(summary.cost_per_million_total_tokens, 3)} counting all"
        )
    if summary.num_short:
        yield f"{summary.num_short:,} answers had fewer tokens than were asked for"
    for failure in summary.failures:
        yield f"failed: {failure.count:,} requests with {failure.kind}, such as: {' '.join(failure.example.split())}"
    if summary.num_interrupted:
        yield f"interrupted: {summary.num_interrupted:,} requests were still running and count nowhere"


def _shown(statistics: LatencyStatistics) -> tuple[float, ...]:
    return statistics.mean, statistics.median, statistics.p90, statistics.p99


def _median_and_p99(statistics: LatencyStatistics | None) -> str:
    return _MISSING if statistics is None else f"{_short(statistics.median)} / {_short(statistics.p99)}"


def _number(value: float | None, num_decimals: int = 1) -> str:
    return _MISSING if value is None else f"{value:,.{num_decimals}f}"


def _short(value: float) -> str:
    return _number(value, 0 if value >= 100 else 1)


def _percent(share: float | None) -> str:
    return _MISSING if share is None else f"{share:.1%}"
