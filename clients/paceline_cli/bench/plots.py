"""A benchmark's results as pictures. The only module that imports matplotlib; it needs no display.

Knows axes and units. Refuses to know how the figures came about.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from paceline_cli.bench.errors import ReportError
from paceline_cli.bench.metrics import MILLISECONDS, LatencyStatistics, Summary
from paceline_cli.bench.records import RungRun, answer_of

_DOTS_PER_INCH = 120
_THOUSANDS = StrMethodFormatter("{x:,g}")

Rungs = Sequence[tuple[RungRun, Summary]]


def write_plots(folder: Path, title: str, rungs: Rungs) -> list[Path]:
    """Throughput against latency over all rungs, and a picture of the gaps between messages for each rung.

    Returns the files. `ReportError` when they cannot be written.
    """
    figures = {"throughput_latency.png": _throughput_against_latency(title, rungs)}
    for number, (run, summary) in enumerate(rungs, start=1):
        name = re.sub(r"[^a-z0-9.]+", "_", run.rung.load.label.lower())
        figures[f"itl_over_time_{number}_{name}.png"] = _gaps_over_time(title, run, summary)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise ReportError(f"--plot: cannot write to {folder}: {error.strerror}") from None
    return [folder / name for name in figures]


def _throughput_against_latency(title: str, rungs: Rungs) -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    labels = [run.rung.load.label for run, _ in rungs]
    throughputs = [summary.output_throughput for _, summary in rungs]
    _draw_latency(left, "Time to first token", labels, throughputs, [summary.ttft for _, summary in rungs])
    _draw_latency(right, "Time per output token", labels, throughputs, [summary.tpot for _, summary in rungs])
    return figure


def _draw_latency(
    axes: Axes,
    name: str,
    labels: Sequence[str],
    throughputs: Sequence[float],
    values: Sequence[LatencyStatistics | None],
) -> None:
    points = [
        (label, throughput, statistics)
        for label, throughput, statistics in zip(labels, throughputs, values, strict=True)
        if statistics is not None
    ]
    x = [throughput for _, throughput, _ in points]
    axes.plot(x, [statistics.median for _, _, statistics in points], "o-", label="median")
    axes.plot(x, [statistics.p99 for _, _, statistics in points], "^--", label="p99")
    for label, throughput, statistics in points:
        axes.annotate(
            label,
            (throughput, statistics.p99),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
        )
    axes.set(xlabel="Output tokens per second, all requests", ylabel=f"{name} (ms)", title=name)
    # Room for the words at the outermost points.
    axes.margins(x=0.2, y=0.15)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_THOUSANDS)
    axes.grid(alpha=0.3)
    if points:
        axes.legend(loc="best")


def _gaps_over_time(title: str, run: RungRun, summary: Summary) -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    answers = [answer for record in run.records if (answer := answer_of(record)) is not None]
    x = [moment - run.started for answer in answers for moment in answer.times[1:]]
    y = [gap * MILLISECONDS for answer in answers for gap in answer.itls]
    axes.scatter(x, y, s=9, alpha=0.4, linewidths=0, label="one gap")
    if summary.itl is not None:
        for name, value, style in (("median", summary.itl.median, "-"), ("p99", summary.itl.p99, "--")):
            axes.axhline(value, color="black", linewidth=1, linestyle=style, label=f"{name}: {value:,.1f} ms")
        axes.legend(loc="upper right", markerscale=3)
    axes.set(
        xlabel="Seconds since the start",
        ylabel="Gap between messages with tokens (ms)",
        title=f"{title}\n{run.rung.load.label}",
    )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_THOUSANDS)
    axes.grid(alpha=0.3)
    return figure
