"""How much memory this process may still take, its container considered. Knows Linux's files only.

Apart from `loading`, which decides what is taken of it.
"""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    machine = _machine_bytes(meminfo)
    limit, current = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or current is None:
        return machine
    return min(machine, max(0, limit - current))


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
