"""How many cores this process may keep busy: affinity mask, topology, and the quota of the control group (a container's
CPU limit).
"""

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cpus: Path = _CPUS, cgroup: Path = _CGROUP) -> int:
    """Returns at least 1. Two hardware threads of a core share its vector units and count once. Threads beyond the
    quota would be stopped in each period, and the others would wait for them.
    """
    cores = {_siblings(cpus, cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), _quota(cgroup, default=len(cores))))


def _siblings(cpus: Path, cpu: int) -> str:
    """`cpu` alone where the system does not tell."""
    try:
        return (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(cgroup: Path, default: int) -> int:
    """In whole cores, rounded up; control groups version 2, then version 1."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return default
    if not (quota.isdecimal() and period.isdecimal() and int(period) > 0):
        return default  # "max", and -1 in version 1, mean no quota
    return -(-int(quota) // int(period))
