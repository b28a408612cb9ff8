"""One executor that lies about terms costs itself, and none of the others. In virtual time."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from itertools import count

import pytest

from both_sides.deployment import Deployment, assert_whole
from paceline.plan.values import MAX_TERM, MAX_TERM_RISE, Claim, ExecutorInfo
from paceline_scheduler.backend import Arrival
from paceline_scheduler.errors import StreamEndedError, TermSupersededError
from paceline_scheduler.link.claim import MAX_RISE
from paceline_scheduler.link.leadership import Readiness, ServingStatus
from paceline_scheduler.link.linked_executor import ShownState
from scheduler_rig.requests import make_request
from scheduler_rig.rig import SchedulerRig
from virtual_time import in_virtual_time

HONEST, OTHER, LIAR = "executor:1", "executor:2", "liar:1"
MADE_UP = "evil.example:1"


@dataclass
class Liar:
    """A network in which one address is a liar's; it is also the liar's connection and plan stream."""

    network: object
    told_term: object = lambda hello: 0  # in GetInfo, given the last hello
    refused_by: object = lambda hello: 0  # the term of the holder that it names
    hello: object = None
    incarnations: count = field(default_factory=lambda: count(7))

    def connect(self, address):
        return self if address == LIAR else self.network.connect(address)

    async def get_info(self, timeout_s):
        """Tell of a term; each time by another process, which nobody has welcomed yet."""
        return ExecutorInfo(next(self.incarnations), self.told_term(self.hello), "")

    def attach(self):
        return self

    async def write(self, message, *more):
        """Take the hello."""
        self.hello = message

    async def read(self):
        """End the stream by a claim that nobody has made."""
        await asyncio.sleep(0.001)
        term = self.refused_by(self.hello)
        raise StreamEndedError("no more") if term is None else TermSupersededError(Claim(term, "evil", MADE_UP))

    def cancel(self):
        """Nothing is held."""

    async def close(self):
        """Nothing is held."""


@contextlib.asynccontextmanager
async def beside(**lies):
    """A scheduler of an honest executor and a liar."""
    async with Deployment(HONEST) as deployment:
        liar = Liar(deployment.network, **lies)
        async with SchedulerRig(f"{HONEST},{LIAR}", liar) as rig:
            yield deployment, rig, liar


async def assert_served(rig):
    """A new request gets all its tokens, at once."""
    await asyncio.wait_for(rig.executors.until_synced(Arrival.NEW), 3)
    request = make_request(5, 30)
    rig.submit(request)
    await rig.until(lambda: request.handle in rig.client.ended or request.handle in rig.client.failures)
    assert_whole(rig, request)


def liar_of(rig):
    """How the scheduler sees it."""
    return next(status for status in rig.executors.statuses() if status.address == LIAR)


@pytest.mark.parametrize(
    ("term", "trouble"),
    [
        (MAX_TERM - 1, "it refuses this scheduler for one of term 0, which does not rank higher"),
        *((term, f"term {term}, which no scheduler can have reached") for term in (MAX_TERM, 2**63, 2**64 - 1)),
    ],
)
@in_virtual_time
async def test_a_term_that_nobody_can_have_come_to_is_that_executors_own_trouble(term, trouble):
    async with beside(told_term=lambda _: term) as (deployment, rig, _):
        await rig.until_ready()
        await asyncio.sleep(5)
        await assert_served(rig)
        assert (rig.leadership.claim.term, deployment[HONEST].epoch) == (1, 1)
        assert liar_of(rig).state == ShownState.LOST
        assert trouble in liar_of(rig).last_error


@pytest.mark.parametrize("term", [0, 1, MAX_TERM - 1, MAX_TERM, 2**62, 2**64 - 1, 10**30])
@in_virtual_time
async def test_superseded_by_a_term_that_cannot_be_is_that_executors_own_trouble(term):
    """Nothing is given up, and nobody is sent to the address that was made up."""
    async with beside(refused_by=lambda _: term) as (deployment, rig, _):
        await rig.until_ready()
        await asyncio.sleep(5)
        await assert_served(rig)
        assert (rig.leadership.claim.term, deployment[HONEST].epoch) == (1, 1)
        assert rig.executors.readiness == Readiness(ServingStatus.SERVING)
        assert (liar_of(rig).state, liar_of(rig).holder) == (ShownState.LOST, None)
        assert "restart this executor" in liar_of(rig).last_error


@pytest.mark.parametrize(
    "lies",
    [
        {"refused_by": lambda hello: hello.claim.term + 1},
        {"refused_by": lambda _: None, "told_term": lambda hello: hello.claim.term if hello else 0},
    ],
    ids=["superseded by the next term", "claimed by the next term"],
)
@in_virtual_time
async def test_who_makes_up_the_next_term_again_and_again_is_believed_less_and_less_often(lies):
    """It cannot be told from the truth; without a welcome it is heeded after 5 s, 10 s, 20 s and so on."""
    async with beside(**lies) as (deployment, rig, liar):
        await rig.until_ready()
        await asyncio.sleep(600)
        assert next(liar.incarnations) > 100
        assert deployment[HONEST].epoch <= 10
        await assert_served(rig)


@in_virtual_time
async def test_after_a_liar_the_next_scheduler_gets_the_honest_executor():
    async with beside(told_term=lambda _: MAX_TERM - 1) as (deployment, rig, _):
        await rig.until_ready()
        await rig.stop()
        async with deployment.rig(scheduler_id="scheduler-b") as after:
            await after.until_ready()
            await assert_served(after)


@in_virtual_time
async def test_a_lone_executor_is_believed():
    async with Deployment(HONEST) as deployment:
        stream = await deployment.stranger(HONEST, "stranger", MAX_TERM_RISE)
        stream.cancel()
        async with deployment.rig() as rig:
            await rig.until_ready()
            assert deployment[HONEST].fence.holder.term == MAX_TERM_RISE + 1


@pytest.mark.parametrize("rise", [1, MAX_RISE, MAX_RISE + 1, MAX_TERM_RISE - 2])
@in_virtual_time
async def test_a_stray_hello_costs_its_executor_the_time_that_it_holds_it(rise):
    """Of any term that an executor takes: the scheduler gets it back, the next one gets it too, and the other executor
    is hardly disturbed.
    """
    async with Deployment(HONEST, OTHER) as deployment:
        async with deployment.rig() as rig:
            await rig.until_ready(2)
            stray = await deployment.stranger(HONEST, "stray", 1 + rise, takes_over=True)
            await asyncio.sleep(0.2)
            stray.cancel()
            await rig.until_ready(2)
            assert deployment[HONEST].fence.holder.term == 2 + rise
            assert deployment[OTHER].epoch <= 3
            await assert_served(rig)
            await rig.stop()
        async with deployment.rig(scheduler_id="scheduler-b") as after:
            await after.until_ready(2)
            await assert_served(after)
