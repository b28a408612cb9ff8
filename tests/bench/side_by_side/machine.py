"""What the machine does beside the measurement: whose CPU time passes, and how much memory an engine holds.

Knows /proc. Readings are values, so that what is made of them can be tried without a machine.
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from side_by_side.results import MAX_OTHERS_SHARE

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")
_LOOK_S = 0.5
PATIENCE_S = 20.0
_SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds of all cores since boot; `busy_s` includes what the host took away."""

    busy_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Quiet:
    """How busy the machine was before a measurement, after waiting for quiet so long."""

    busy_share: float
    waited_s: float

    @property
    def is_quiet(self) -> bool:
        return self.busy_share <= MAX_OTHERS_SHARE


def read_cpu_times() -> CpuTimes:
    fields = (_PROC / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    user, nice, system, idle, io_wait, interrupts, soft_interrupts, steal = (int(field) for field in fields)
    busy = user + nice + system + interrupts + soft_interrupts + steal
    return CpuTimes(busy / _TICKS_PER_S, (busy + idle + io_wait) / _TICKS_PER_S)


def wait_until_quiet(
    patience_s: float = PATIENCE_S,
    read: Callable[[], CpuTimes] = read_cpu_times,
    sleep: Callable[[float], None] = time.sleep,
) -> Quiet:
    """Return as soon as the machine is quiet, or when patience is at its end: the caller marks its result then."""
    waited_s = 0.0
    while True:
        before = read()
        sleep(_LOOK_S)
        waited_s += _LOOK_S
        after = read()
        share = (after.busy_s - before.busy_s) / max(after.total_s - before.total_s, 1e-9)
        quiet = Quiet(share, waited_s)
        if quiet.is_quiet or waited_s >= patience_s:
            return quiet


class OthersWatch:
    """The share of the machine's CPU time that others took while a block ran: neither the engine nor this process."""

    def __init__(self, group: int) -> None:
        self._group = group
        self.share = 0.0

    def __enter__(self) -> Self:
        self._cpu, self._ours_s = read_cpu_times(), self._read_ours_s()
        return self

    def __exit__(self, *_: object) -> None:
        cpu, ours_s = read_cpu_times(), self._read_ours_s()
        total_s = max(cpu.total_s - self._cpu.total_s, 1e-9)
        self.share = max(0.0, (cpu.busy_s - self._cpu.busy_s - (ours_s - self._ours_s)) / total_s)

    def _read_ours_s(self) -> float:
        own = os.times()
        return own.user + own.system + group_cpu_s(self._group)


class MemoryWatch:
    """The largest memory that some processes held together while a block ran, in bytes.

    A page counts for every process that has it (RSS), shared or not: were it divided among those that share it, an
    engine would become smaller because another one maps the same model file.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, sum(_rss_bytes(pid) for pid in self._pids))
            if self._is_over.wait(_SAMPLE_S):
                return


def describe_machine() -> str:
    """Cores, processor and interpreter, for the head of the table."""
    lines = (_PROC / "cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {(models or [platform.machine()])[0]}, Python {platform.python_version()}"


def group_cpu_s(group: int) -> float:
    """The CPU time that the processes of a group have taken which are still there."""
    return sum(_cpu_s(int(path.name)) for path in _PROC.glob("[0-9]*") if _group_of(path) == group)


def _stat_fields(path: Path) -> list[str]:
    """The fields after the command's name, which may itself hold spaces; empty when the process has ended."""
    try:
        return (path / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _group_of(path: Path) -> int | None:
    fields = _stat_fields(path)
    return int(fields[2]) if fields else None


def _cpu_s(pid: int) -> float:
    fields = _stat_fields(_PROC / str(pid))
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0


def _rss_bytes(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except OSError:
        return 0
