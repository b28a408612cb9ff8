"""What a stage has found: checks and figures, printed as they come and written after each. Knows no bars.

So a stage that is cut short has shown and written what it had.
"""

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpu.errors import DoesNotFitError, GpuRunError


@dataclass(frozen=True, slots=True)
class Check:
    """Something that has to be so."""

    name: str
    is_good: bool
    sentence: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured."""

    numbers: str  # "bf16" or "fp8"
    what: str
    shape: str
    unit: str
    engine: float | None = None  # rows and runner in one process
    system: float | None = None  # client, scheduler and executor as processes


@dataclass(slots=True)
class Report:
    """Of one stage. Nothing is begun after the deadline."""

    file: Path
    deadline: float  # by the monotonic clock
    device: str
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether all that was checked is as it must be. What was left out has not been checked: it is named."""
        return all(check.is_good for check in self.checks)

    def check(self, name: str, call: Callable[[], str]) -> None:
        """Do a check: what it returns says what was seen; what it raises, what is wrong."""
        if time.monotonic() > self.deadline:
            self.leave_out(f"{name}: the time was up")
            return
        begun = time.monotonic()
        try:
            is_good, sentence = True, call()
        except DoesNotFitError as error:
            self.leave_out(f"{name}: {error}")
            return
        except Exception as error:  # whatever is wrong with one, the others are still worth knowing
            is_good, sentence = False, _sentence_of(error)
        self.checks.append(Check(name, is_good, sentence, time.monotonic() - begun))
        print(f"{'ok    ' if is_good else 'FAILED'} {name}: {sentence}", flush=True)
        self.write()

    def add(self, figures: list[Figure]) -> None:
        """Take in figures, those that belong to one cell into one."""
        for figure in figures:
            place = (figure.numbers, figure.what, figure.shape)
            known = next((one for one in self.figures if (one.numbers, one.what, one.shape) == place), None)
            if known is None:
                self.figures.append(figure)
                continue
            engine = known.engine if figure.engine is None else figure.engine
            system = known.system if figure.system is None else figure.system
            self.figures[self.figures.index(known)] = Figure(*place, figure.unit, engine, system)
        self.write()

    def measured(self, measure: Callable[[], list[Figure]]) -> str:
        """Take in what a cell of one side brings; says it in a sentence."""
        figures = measure()
        self.add(figures)
        return ", ".join(f"{figure.engine or figure.system or 0.0:.4g} {figure.unit}" for figure in figures)

    def leave_out(self, what: str) -> None:
        """Say what was not done, and why."""
        self.left_out.append(what)
        print(f"left out: {what}", flush=True)
        self.write()

    def write(self) -> None:
        found = {
            "device": self.device,
            "is_good": self.is_good,
            "checks": [asdict(check) for check in self.checks],
            "figures": [asdict(figure) for figure in self.figures],
            "left_out": self.left_out,
        }
        self.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _sentence_of(error: Exception) -> str:
    """A known error by its sentence, any other one with its end of the stack, too."""
    first = " ".join(str(error).strip().splitlines()[:2])[:400]
    if isinstance(error, GpuRunError):
        return first
    traceback.print_exception(error, limit=-6)
    return f"{type(error).__name__}: {first}"
