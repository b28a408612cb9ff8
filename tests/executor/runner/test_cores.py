"""How many cores the runner takes for its own: affinity, hardware threads and a container's limit."""

import os

import pytest

from paceline_executor.runner.cores import usable_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of four hardware threads on two cores, without a limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        topology = tmp_path / "cpus" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    (tmp_path / "cgroup" / "cpu").mkdir(parents=True)
    return tmp_path


def cores(machine):
    """What the machine's files say."""
    return usable_cores(machine / "cpus", machine / "cgroup")


def test_two_hardware_threads_of_a_core_count_once(machine):
    assert cores(machine) == 2


def test_only_cores_inside_the_affinity_mask_count(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3})
    assert cores(machine) == 1


def test_without_a_topology_every_cpu_is_a_core(machine, monkeypatch):
    assert usable_cores(machine / "nowhere", machine / "cgroup") == 4


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", 2), ("100000 100000", 1), ("150000 100000", 2), ("10000 100000", 1), ("nonsense", 2)],
)
def test_a_control_group_limits_the_cores(machine, limit, expected):
    """Version 2: a quota per period, rounded up to whole cores."""
    (machine / "cgroup" / "cpu.max").write_text(f"{limit}\n")
    assert cores(machine) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 2), ("100000", 1)])
def test_an_old_control_group_limits_the_cores_too(machine, quota, expected):
    """Version 1: -1 is no limit."""
    (machine / "cgroup" / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (machine / "cgroup" / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores(machine) == expected
