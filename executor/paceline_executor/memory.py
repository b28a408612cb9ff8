"""How much memory this process may still take, its container considered, and which errors say that none is left.

Apart from `loading` and steps, which decide what is taken.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from paceline_executor.errors import ShortMemoryError

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_MAX_CAUSES = 16  # they may go round in a circle
_WORDED = (RuntimeError, ImportError, OSError)


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    machine = _machine_bytes(meminfo)
    limit, current = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or current is None:
        return machine
    return min(machine, max(0, limit - current))


@contextmanager
def explained(sentence: str) -> Iterator[None]:
    """Raises ShortMemoryError, with this sentence, where memory runs out."""
    try:
        yield
    except (MemoryError, *_WORDED) as error:
        if not is_out_of_memory(error):
            raise
        raise ShortMemoryError(sentence) from error


def is_out_of_memory(error: BaseException) -> bool:
    """torch, CUDA, cuBLAS and the loader of libraries say so in words. A capture that fails of it raises another."""
    return any(map(_says_memory, islice(_with_causes(error), _MAX_CAUSES)))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    told: BaseException | None = error
    while told is not None:
        yield told
        told = told.__cause__ or told.__context__


def _says_memory(error: BaseException) -> bool:
    words = str(error).lower()
    phrases = "out of memory", "n't allocate memory", "cannot allocate memory", "alloc_failed", "failed to map segment"
    is_worded = isinstance(error, _WORDED) and any(one in words for one in phrases)
    return is_worded or isinstance(error, MemoryError)


def _machine_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{meminfo} does not say MemAvailable")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no such limit, or "max"
