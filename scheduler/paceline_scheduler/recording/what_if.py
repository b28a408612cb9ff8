"""What other settings of the scheduler would have done with the requests of a recording, beside what was.

It is a simulation, and says so. Refuses to know how it is made.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.process.small_files import read_small_file
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.errors import RecordingError
from paceline_scheduler.recording.learned import Learned
from paceline_scheduler.recording.replay import Recording, replay
from paceline_scheduler.recording.simulation import simulate
from paceline_scheduler.recording.tally import Tally

_HONESTY = (
    "simulated: the real core on a model of the executors (least squares over the recorded steps), without faults;\n"
    "trust it as far as the second column is like the first"
)


def read_policy(text: str, limits: CoreLimits) -> CoreLimits:
    """Return bounds with the named ones changed. Raises RecordingError for what is none."""
    known = [each.name for each in fields(CoreLimits)]
    try:
        wanted = json.loads(text if text.lstrip().startswith("{") else read_small_file(Path(text)))
    except OSError as error:
        raise RecordingError(f"--policy: cannot read {text}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RecordingError(f'--policy: {error}; write JSON such as {{"itl_budget_s": 0.1}}') from error
    if not isinstance(wanted, dict):
        raise RecordingError('--policy: is no JSON object; write one such as {"itl_budget_s": 0.1}')
    for name, value in wanted.items():
        if name not in known:
            raise RecordingError(f"--policy: there is no setting {name!r}; there are {', '.join(known)}")
        is_whole = name.startswith(("max_num", "max_plans"))
        is_number = type(value) is int or (type(value) is float and not is_whole)
        if not is_number or value < 0 or (value == 0 and name != "max_num_draft_tokens"):
            raise RecordingError(f"--policy: {name} has to be a {'whole ' * is_whole}number above 0, and is {value!r}")
    return replace(limits, **wanted)


def compare(recording: Recording, policy: str, plot: Path | None) -> str:
    """Return a table of what was and of what is simulated.

    Raises RecordingError.
    """
    recorded, learned = Tally(), Learned()
    limits = recording.fresh_core().state.limits
    other = read_policy(policy, limits)
    done = replay(recording, [recorded, learned])
    if done.difference is not None:
        raise RecordingError("this program repeats the recording otherwise, so it cannot say what would have been")
    columns: dict[str, Tally] = {"recorded": recorded}
    notes = []
    for name, bounds in (("simulated", limits), ("simulated, with the policy", other)):
        columns[name] = Tally()
        if not simulate(recording, learned, bounds, columns[name]):
            notes.append(f"{name}: not all requests came to an end")
    if plot is not None:
        from paceline_scheduler.recording.plots import draw  # needs what servers do not

        draw(columns, plot)
        notes.append(f"the picture is in {plot}")
    return "\n".join((*_table(columns), *notes, _HONESTY))


def _table(columns: Mapping[str, Tally]) -> Iterator[str]:
    yield " " * 28 + "".join(f"{name:>28}" for name in columns)
    for name, number in _rows():
        yield f"{name:<28}" + "".join(f"{number(tally):>28}" for tally in columns.values())


def _rows() -> Iterator[tuple[str, Any]]:
    for name, attribute in (
        ("first token", "first_tokens_s"),
        ("between tokens", "intervals_s"),
        ("whole request", "whole_s"),
    ):
        for share in (50, 99):
            yield f"{name}, p{share} (ms)", lambda tally, of=attribute, at=share: _percentile(getattr(tally, of), at)
    yield "tokens per second", lambda tally: f"{tally.tokens_per_s:,.1f}"
    yield "steps", lambda tally: f"{tally.num_steps:,}"
    yield "requests with an end", lambda tally: f"{len(tally.whole_s):,}"
    yield "preemptions", lambda tally: f"{tally.num_preemptions:,}"
    yield "refusals", lambda tally: f"{tally.num_refusals:,}"


def _percentile(seconds: list[float], share: int) -> str:
    return f"{np.percentile(seconds, share) * 1e3:,.2f}" if seconds else "-"
