"""The pictures as SVG files. Knows axes, units and colours; refuses to know where the figures come from."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pictures.figures import Pauses, Throughput, Timeline

_SIZE = (8, 4.2)
_OURS, _OTHERS = "#0b6e4f", ("#b5651d", "#4a6fa5", "#8d5a97", "#777777")


def draw_throughput(figures: Throughput, path: Path) -> None:
    """Tokens per second of all streams against the time between two tokens of one."""

    def draw(axes: Axes) -> None:
        for (engine, loads), colour in zip(figures.engines.items(), (_OURS, *_OTHERS), strict=False):
            x, y = [load.output_tok_s for load in loads], [load.token_ms for load in loads]
            axes.plot(x, y, "o-", color=colour, label=engine, linewidth=2 if colour == _OURS else 1.2)
            for load in loads:
                axes.annotate(
                    str(load.num_streams),
                    (load.output_tok_s, load.token_ms),
                    xytext=(5, -11),
                    textcoords="offset points",
                    fontsize=8,
                    color=colour,
                )
        axes.set(
            title="Throughput against latency; the numbers are streams",
            xlabel="output tokens per second, all streams (more is better)",
            ylabel="ms between tokens of one stream\n(less is better)",
        )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)

    _save(figures.source, path, draw)


def draw_pauses(figures: Pauses, path: Path) -> None:
    """Which share of the streams that a fault hit went on after how long."""

    def draw(axes: Axes) -> None:
        for (kind, pauses), colour in zip(figures.kinds.items(), (_OURS, *_OTHERS), strict=False):
            shares = [100 * (place + 1) / len(pauses) for place in range(len(pauses))]
            axes.step(pauses, shares, where="post", color=colour, label=f"{kind}, {len(pauses):,} streams")
        axes.set(
            title="Pause of a stream when a process is killed",
            xlabel="seconds from the last token before to the first one after",
            ylabel="% of the streams that go on by then",
        )
        axes.set_xlim(left=0)
        axes.set_ylim(0, 100)
        axes.legend(frameon=False, loc="lower right")

    _save(figures.source, path, draw)


def draw_timeline(figures: Timeline, path: Path) -> None:
    """What each step computed, over time: a bar is as wide as its step took."""

    def draw(axes: Axes) -> None:
        ends = list(accumulate(step.idle_s + step.busy_s for step in figures.steps))
        origin = figures.steps[0].idle_s
        starts = [end - step.busy_s - origin for end, step in zip(ends, figures.steps, strict=True)]
        widths = [step.busy_s for step in figures.steps]
        rows = [step.num_rows for step in figures.steps]
        others = [step.num_tokens - step.num_rows for step in figures.steps]
        axes.bar(starts, others, widths, bottom=rows, align="edge", color=_OTHERS[0], label="further tokens of prompts")
        axes.bar(starts, rows, widths, align="edge", color=_OURS, label="one token per row")
        axes.set(
            title="Steps while a prompt of 1,900 tokens arrives beside 8 streams",
            xlabel="seconds; each bar is as wide as its step took",
            ylabel="tokens in the step",
        )
        axes.legend(frameon=False)

    _save(figures.source, path, draw)


def _save(source: str, path: Path, draw: Callable[[Axes], None]) -> None:
    # Text stays text, and the same figures give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.family": "sans-serif"}):
        figure = Figure(figsize=_SIZE, layout="constrained", facecolor="white")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        draw(axes)
        figure.supxlabel(source, fontsize=7, color="#666666")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
