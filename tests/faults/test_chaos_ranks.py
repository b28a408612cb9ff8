"""Processes that outlive their executor: of one whose children end with it, and of one whose children do not."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from paceline_cli.chaos import ranks
from paceline_cli.chaos.ledger import ChaosLedger
from paceline_cli.chaos.ranks import RankWatch, followers_of
from paceline_cli.chaos.report import figures_of, report_fields
from paceline_cli.chaos.waiting import until

PARENT = """
import subprocess, sys
children = [subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(2)]
print("started", flush=True)
children[0].wait()
"""
ENDS_WITH_IT, OUTLIVES_IT = ("cat",), ("sleep", "60")


@contextmanager
def rank_0_with(child):
    """A process with two children."""
    with subprocess.Popen([sys.executable, "-c", PARENT, *child], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("child", "num_left"), [(ENDS_WITH_IT, 0), (OUTLIVES_IT, 2)])
async def test_what_outlives_the_executor_is_counted_and_killed(child, num_left, monkeypatch):
    monkeypatch.setattr(ranks, "END_SECONDS", 0.5)
    with rank_0_with(child) as process:
        followers = [os.pidfd_open(number) for number in followers_of(process.pid)]
        group = RankWatch(process.pid)
        process.kill()
        await until(lambda: group.ended_s is not None)
        assert (len(followers), await group.close()) == (2, num_left)
        await until(lambda: all(ranks._has_ended(file) for file in followers))


async def test_the_ranks_of_an_executor_that_goes_on_are_left_alone():
    with rank_0_with(OUTLIVES_IT) as process:
        assert await RankWatch(process.pid).close() == 0
        children = followers_of(process.pid)
        assert len(children) == 2
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_process_that_is_left_fails_the_campaign_and_is_in_the_report():
    ledger = ChaosLedger(0.0)
    window = ledger.open_window("rank-kill", "", 1.0)
    assert figures_of("", ledger.windows).is_clean
    window.ranks.num_left = 2
    assert not figures_of("", ledger.windows).is_clean
    assert report_fields(ledger.windows)["faults"][-1]["num_processes_left"] == 2
