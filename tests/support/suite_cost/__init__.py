"""What a run of the tests costs: CPU seconds of all its processes, as a multiple of a loop that any machine can run.

Seconds of one machine mean nothing on another, and cores that share their units slow each other. So every process of
the run does the loop's work now and then, between tests, and the sum is told in multiples of what that took.
"""

import hashlib
import json
import resource
import statistics
import time
from pathlib import Path

_NUM_TESTS_BETWEEN = 50
_NUM_ADDITIONS = 400_000
_NUM_HASHES = 40_000

# Calibration loops. They may rise as the totals in tests/repository may: for what a user gets, said in DECISIONS.md.
LIMITS = {"test": 10_300, "all": 58_000}
_SLACK = 1.25

FILE = Path(".pytest-cost.json")


def calibration_loop() -> float:
    """Take the CPU seconds of a fixed piece of work: interpreted additions, and hashes of 1 KiB."""
    begun = time.process_time()
    total, data = 0, bytes(1024)
    for number in range(_NUM_ADDITIONS):
        total += number
    for _ in range(_NUM_HASHES):
        data = hashlib.sha256(data).digest() * 32
    return time.process_time() - begun


class ProcessCost:
    """What one process of the run and its children, those that have ended, have used."""

    def __init__(self) -> None:
        self._num_tests = 0
        self._loops: list[float] = []

    def test_ends(self) -> None:
        if self._num_tests % _NUM_TESTS_BETWEEN == 0:
            self._loops.append(calibration_loop())
        self._num_tests += 1

    def taken(self) -> tuple[float, list[float]]:
        """Return CPU seconds without those of the loops, and these."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used) - sum(self._loops), self._loops


class SuiteCost:
    """The sum over the processes of a run."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._loops: list[float] = []

    def add(self, seconds: float, loops: list[float]) -> None:
        self._seconds += seconds
        self._loops += loops

    @property
    def multiple(self) -> float:
        """How many calibration loops would have taken as much CPU time."""
        return self._seconds / statistics.median(self._loops) if self._loops else 0.0

    def write(self, tier: str) -> None:
        found = {"tier": tier, "cpu_seconds": round(self._seconds, 1), "calibration_loops": round(self.multiple)}
        FILE.write_text(json.dumps(found) + "\n")

    def is_above_limit(self, tier: str) -> bool:
        """Whether it is by more than what machines differ; a tier without a limit never is."""
        return tier in LIMITS and self.multiple > _SLACK * LIMITS[tier]

    def told(self, tier: str) -> str:
        limit = f", the limit is {LIMITS[tier]:,}" if tier in LIMITS else ""
        return f"{self._seconds:.0f} CPU-seconds, {self.multiple:,.0f} calibration loops{limit} ({FILE})"
