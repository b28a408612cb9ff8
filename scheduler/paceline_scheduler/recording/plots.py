"""A simulation beside what was, as a picture.

Apart, as the only module of the scheduler that imports matplotlib. Knows axes and units.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from paceline_scheduler.errors import RecordingError
from paceline_scheduler.recording.tally import Tally

_PARTS = (("Time to first token", "first_tokens_s"), ("Time between tokens", "intervals_s"), ("Requests", "whole_s"))


def draw(columns: Mapping[str, Tally], path: Path) -> None:
    """Write an SVG file: which share of the times is below each, one line per column. Raises RecordingError."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise RecordingError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle("Recorded, and simulated on a model of the executors")
    for axes, (title, attribute) in zip(figure.subplots(1, len(_PARTS)), _PARTS, strict=True):
        for name, tally in columns.items():
            times = np.sort(getattr(tally, attribute)) * 1e3
            if len(times):
                axes.step(times, np.arange(1, len(times) + 1) / len(times), where="post", label=name)
        axes.set(title=title, xlabel="Milliseconds", ylabel="Share of them below", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    try:
        figure.savefig(path, format="svg")
    except OSError as error:
        raise RecordingError(f"--plot: cannot write {path}: {error.strerror or error}") from error
