"""What came of the faults: a row of figures per kind, and the same for programs.

Knows windows. Times in seconds.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from paceline_cli.bench.metrics import percentile
from paceline_cli.chaos.comparison import Mismatches
from paceline_cli.chaos.ledger import UNDISTURBED, FaultWindow


@dataclass(frozen=True, slots=True)
class Spread:
    p50: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class KindFigures:
    kind: str
    num_faults: int
    num_stalls: int
    """Streams that were delivering when one of them was done, over all of them."""
    stall: Spread | None
    """The pause of each of these streams at the fault; None without one."""
    longest: Spread | None
    """The longest pause of each until the next fault."""
    silence_seconds: float
    """The longest time in which no stream got anything."""
    settled: Spread | None
    """How long until all streams had got something and all parts were there again."""
    num_unsettled: int
    num_tokens: int
    num_done: int
    failures: Counter[str]
    mismatches: Mismatches
    executor_ends: Spread | None
    """How long executors of several ranks went on."""
    num_left: int
    """Processes of these that were there seconds after them."""
    untrue: tuple[str, ...]
    """What metrics claimed that is not what clients saw."""

    @property
    def num_failed(self) -> int:
        return self.failures.total()

    @property
    def is_clean(self) -> bool:
        """Whether nothing failed, was lost, doubled, changed, left or untrue, and the system came back each time."""
        return not (self.num_failed or self.mismatches or self.num_unsettled or self.num_left or self.untrue)


def figures_by_kind(windows: Sequence[FaultWindow]) -> list[KindFigures]:
    """A row per kind, in the order of their first faults."""
    kinds = dict.fromkeys(window.kind for window in windows)
    return [figures_of(kind, [window for window in windows if window.kind == kind]) for kind in kinds]


def figures_of(kind: str, windows: Sequence[FaultWindow]) -> KindFigures:
    stalls = [stall for window in windows for stall in window.stalls.values()]
    failures, mismatches = Counter[str](), Mismatches()
    for window in windows:
        failures += window.failures
        mismatches.add(window.mismatches)
    faults = [window for window in windows if window.kind != UNDISTURBED]
    return KindFigures(
        kind=kind,
        num_faults=len(faults),
        num_stalls=len(stalls),
        stall=spread_of(stalls),
        longest=spread_of(pause for window in windows for pause in window.longest.values()),
        silence_seconds=max((window.silence_seconds for window in windows), default=0.0),
        settled=spread_of(window.settled_seconds for window in faults if window.settled_seconds is not None),
        num_unsettled=sum(window.is_given_up for window in faults),
        num_tokens=sum(window.num_tokens for window in windows),
        num_done=sum(window.num_done for window in windows),
        failures=failures,
        mismatches=mismatches,
        executor_ends=spread_of(end_s for window in windows for end_s in window.ranks.seconds),
        num_left=sum(window.ranks.num_left for window in windows),
        untrue=tuple(sentence for window in windows for sentence in window.untrue),
    )


def spread_of(seconds: Iterable[float]) -> Spread | None:
    """None of none."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return Spread(percentile(ordered, 50), percentile(ordered, 99), ordered[-1])


def report_fields(windows: Sequence[FaultWindow]) -> dict[str, object]:
    """Pauses are in seconds."""
    return {
        "faults": [_fault_fields(window) for window in windows],
        "kinds": [_kind_fields(figures) for figures in figures_by_kind(windows)],
    }


def _fault_fields(window: FaultWindow) -> dict[str, object]:
    return {
        "kind": window.kind,
        "detail": window.detail,
        "num_in_flight": window.num_in_flight,
        "stalls_seconds": sorted(round(stall, 4) for stall in window.stalls.values()),
        "longest_seconds": sorted(round(pause, 4) for pause in window.longest.values()),
        "silence_seconds": round(window.silence_seconds, 4),
        "settled_seconds": window.settled_seconds,
        "num_tokens": window.num_tokens,
        "num_done": window.num_done,
        "failures": dict(window.failures),
        "executor_ends_seconds": window.ranks.seconds,
        "num_processes_left": window.ranks.num_left,
        "untrue_metrics": window.untrue,
        **_mismatch_fields(window.mismatches),
    }


def _kind_fields(figures: KindFigures) -> dict[str, object]:
    return {
        "kind": figures.kind,
        "num_faults": figures.num_faults,
        "num_stalls": figures.num_stalls,
        "stall_seconds": figures.stall and asdict(figures.stall),
        "longest_seconds": figures.longest and asdict(figures.longest),
        "silence_seconds": figures.silence_seconds,
        "settled_seconds": figures.settled and asdict(figures.settled),
        "num_unsettled": figures.num_unsettled,
        "num_tokens": figures.num_tokens,
        "num_done": figures.num_done,
        "num_failed": figures.num_failed,
        "failures": dict(figures.failures),
        "executor_ends_seconds": figures.executor_ends and asdict(figures.executor_ends),
        "num_processes_left": figures.num_left,
        **_mismatch_fields(figures.mismatches),
    }


def _mismatch_fields(mismatches: Mismatches) -> dict[str, object]:
    return {
        "num_lost": mismatches.num_lost,
        "num_doubled": mismatches.num_doubled,
        "num_changed": mismatches.num_changed,
        "first_flaw": mismatches.first,
    }
