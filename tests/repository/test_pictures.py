"""Pictures of the documents: they show the data beside them, and the data are what a run's results hold."""

import re
from pathlib import Path

import pytest

from pictures.__main__ import FOLDER
from pictures.drawing import draw_pauses, draw_throughput, draw_timeline
from pictures.figures import (
    Load,
    Step,
    load_pauses,
    load_screen,
    load_throughput,
    load_timeline,
    pauses_of,
    throughput_of,
    timeline_of,
)
from pictures.screens import draw_screen
from side_by_side.results import EngineFacts, Results, Sample

_DRAWN = {
    "throughput.svg": lambda path: draw_throughput(load_throughput(), path),
    "pauses.svg": lambda path: draw_pauses(load_pauses(), path),
    "timeline.svg": lambda path: draw_timeline(load_timeline(), path),
    "screen.svg": lambda path: draw_screen(load_screen(), path),
}


@pytest.mark.parametrize("name", _DRAWN)
def test_a_committed_picture_shows_the_committed_data(name: str, tmp_path: Path) -> None:
    _DRAWN[name](tmp_path / name)
    assert _shown((FOLDER / name).read_text()) == _shown((tmp_path / name).read_text())


def test_other_data_are_another_picture(tmp_path: Path) -> None:
    pauses = load_pauses()
    first = next(iter(pauses.kinds))
    draw_pauses(type(pauses)(pauses.source, {first: [pause * 2 for pause in pauses.kinds[first]]}), tmp_path / "a.svg")
    assert _shown((tmp_path / "a.svg").read_text()) != _shown((FOLDER / "pauses.svg").read_text())


def test_throughput_is_the_median_of_repetitions_and_latency_that_of_streams() -> None:
    """A median of medians would hide a repetition."""

    def sample(repetition: int, output_tok_s: float, *ends: float) -> Sample:
        raw = [{"token_s": [[1.0, 1.0, end] for end in ends]}]
        return Sample("streams-8", "ours", repetition, {"output_tok_s": output_tok_s}, 0, 0, 0, 0, raw)

    samples = [sample(0, 100.0, 1.2, 1.4), sample(1, 300.0, 1.6), sample(2, 200.0, 1.8, 2.0)]
    results = Results("2026-01-02 03:04", "a machine", {"ours": EngineFacts("ours"), "absent": EngineFacts("absent")})
    results.samples += samples
    figures = throughput_of(results)
    assert figures.engines == {"ours": [Load(8, 200.0, 300.0)]}
    assert figures.source == "2026-01-02, a machine"


def test_the_timeline_holds_the_steps_that_computed() -> None:
    results = Results("2026-01-02 03:04", "a machine")
    with pytest.raises(ValueError, match="timeline"):
        timeline_of(results)
    steps = [
        {"num_rows": 0, "num_tokens": 0, "busy_s": 0.1, "idle_s": 0.2},
        {"num_rows": 2, "num_tokens": 9, "busy_s": 0.3, "idle_s": 0.4},
    ]
    results.samples.append(Sample("timeline", "ours", 0, {}, 0, 0, 0, 0, [{"steps": steps}]))
    assert timeline_of(results).steps == [Step(2, 9, 0.3, 0.4)]


def test_pauses_are_those_of_all_faults_of_a_kind() -> None:
    faults = [
        {"kind": "scheduler-kill", "stalls_seconds": [0.2, 0.3]},
        {"kind": "none", "stalls_seconds": []},
        {"kind": "scheduler-kill", "stalls_seconds": [0.1]},
    ]
    assert pauses_of({"faults": faults}, "here").kinds == {"scheduler-kill": [0.1, 0.2, 0.3]}


def _shown(svg: str) -> list[str]:
    """Words and points of a picture, to a tenth of a pixel: not what another matplotlib may write otherwise."""
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    points = re.findall(r"-?\d+\.?\d*", " ".join(re.findall(r'<path d="([^"]*)"', svg)))
    return words + [f"{float(point):.1f}" for point in points]
