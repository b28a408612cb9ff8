"""A peer that is alive but does not get on with its welcome: heartbeats alone do not keep a stream. In virtual time."""

import asyncio

import pytest

from paceline.plan.values import (
    Claim,
    ExecutorInfo,
    ExecutorLimits,
    Heartbeat,
    KvGeometry,
    Model,
    WaitingInLine,
    Welcome,
)
from paceline_scheduler.errors import StreamEndedError
from paceline_scheduler.link.claim import OwnClaim
from paceline_scheduler.link.plan_stream import PlanStream, Steps
from paceline_scheduler.testing.virtual_time import run_in_virtual_time

WELCOME = Welcome(
    incarnation=1,
    epoch=1,
    protocol=2,
    model=Model("simulated", "simulated", 256, 32_000),
    geometry=KvGeometry(64, 4),
    limits=ExecutorLimits(8, 64, 256, 4),
    tag_key=bytes(32),
)


class BeatingStream:
    """Says what it is given, then beats for ever."""

    def __init__(self, *messages):
        self._messages = list(messages)

    async def read(self):
        """Return the next message."""
        if self._messages:
            return self._messages.pop(0)
        await asyncio.sleep(0.2)
        return Heartbeat()

    async def write(self, *messages):
        """Take anything."""

    def cancel(self):
        """Nothing to end."""


class Events:
    """Hears of a place in the queue, and of nothing else."""

    def waits_in_line(self, notice):
        """Another scheduler drives."""


def drive(*messages):
    """Drive a stream for a minute at most; returns why it ended, None if it did not."""

    async def main():
        clock = asyncio.get_running_loop().time
        none = Steps(finish=lambda _: None, due=lambda: None)
        driver = PlanStream(BeatingStream(*messages), Events(), none, clock)
        try:
            async with asyncio.timeout(60):
                await driver.run(OwnClaim("scheduler-a").hello("executor:1", ExecutorInfo(1, 0, "")))
        except TimeoutError:
            return None
        except StreamEndedError as error:
            return str(error)

    return run_in_virtual_time(main())


@pytest.mark.parametrize("messages", [(), (WELCOME,)], ids=["nothing", "a welcome without a snapshot"])
def test_a_welcome_that_does_not_come_or_stays_without_its_snapshot_ends_the_stream(messages):
    """It is attached again, instead of being waited for until somebody looks."""
    assert "no welcome or no more of its snapshot" in drive(*messages)


def test_a_place_in_line_is_kept_for_as_long_as_heartbeats_come():
    assert drive(WaitingInLine(Claim(1, "scheduler-b"))) is None
