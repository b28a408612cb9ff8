"""Whom `paceline top` asks: over links that are slow, servers that stand by, and callers that may not."""

import asyncio
import random
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from edge_rig.edge_server import serve_edge, wait_until
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tokenizers import served_model
from paceline.plan.values import Claim
from paceline_cli.chaos.proxy import FaultProxy, LinkState
from paceline_cli.top import wire
from paceline_cli.top.source import Source
from paceline_cli.top.state import TopState
from paceline_client.errors import AccessDeniedError, InvalidRequestError
from paceline_scheduler.api.servicer_access import Access
from paceline_scheduler.backend import ExecutorStatus
from paceline_scheduler.observers.steps import StepRecord, StepTotals

CHANCE = random.SystemRandom()
NUM_STEPS = 20_000
EXECUTOR = ExecutorStatus("10.0.0.1:50061", 3, 7, 2, "tiny", 1, 100, 60, 10, 30, 0, 3, 4, 2, "", StepTotals())
HELD = replace(EXECUTOR, state=1, holder=Claim(3, "other", "10.0.0.9:50051"))


def step(number):
    """A step in which one request got its first token after so many seconds."""
    return StepRecord(EXECUTOR.address, 2, number, *[1] * 19, first_token_ns=(number * 1_000_000_000,))


@asynccontextmanager
async def server(*executors, access=None):
    """A scheduler in this process that tells of these executors."""
    backend = ScriptedBackend(served_model())
    backend.known_executors = executors
    async with serve_edge(backend, access=access) as served:
        yield served


@asynccontextmanager
async def through_a_proxy(served):
    host, port = served.address.split(":")
    async with FaultProxy(host, int(port), CHANCE) as proxy:
        yield proxy


@asynccontextmanager
async def source_of(target):
    state = TopState()
    source = Source(target, None, None, state, time.monotonic)
    try:
        yield source, state
    finally:
        await source.close()


async def test_over_a_slow_link_old_steps_are_left_out():
    async with (
        server(EXECUTOR) as served,
        through_a_proxy(served) as proxy,
        source_of(proxy.address) as (source, state),
    ):
        await source.ask()
        await wait_until(lambda: served.backend.watch.sinks)
        proxy.become(LinkState(bytes_per_second=16_000))
        for number in range(1, NUM_STEPS + 1):
            served.backend.watch.sinks[0].step_finished(step(number))
            if not number % 100:
                await asyncio.sleep(0.005)
        await source.ask()
        await wait_until(lambda: state.first_tokens.quantiles(time.monotonic(), [1.0]) == (NUM_STEPS,), 60)
        num_seen = NUM_STEPS - state.num_unseen_steps
    assert 0 < num_seen < NUM_STEPS / 4


@pytest.mark.parametrize("has_active", [True, False])
async def test_a_scheduler_that_stands_by_is_only_shown_where_there_is_no_other(has_active):
    async with (
        server(HELD) as standby,
        server(EXECUTOR if has_active else HELD) as other,
        source_of(f"{standby.address},{other.address}") as (source, state),
    ):
        await source.ask()
        assert (state.overview.holder == "") is has_active
        if has_active:
            assert state.server == other.address
            standby.backend.known_executors, other.backend.known_executors = (EXECUTOR,), (HELD,)
            await source.ask()
            assert (state.server, state.overview.holder) == (standby.address, "")


async def test_how_long_an_executor_has_been_lost_is_told():
    lost = replace(EXECUTOR, state=5, lost_for_s=50.5)
    async with server(lost) as served, source_of(served.address) as (source, state):
        await source.ask()
    (shown,) = state.overview.executors
    assert (shown.state.value, shown.lost_for_s) == ("lost", 50.5)


async def test_what_an_operator_may_not_see_ends_it():
    """It is no scheduler that is lost: looking on would help nobody."""
    async with server(EXECUTOR, access=Access(lambda _: None)) as served, source_of(served.address) as (source, state):
        with pytest.raises(AccessDeniedError):
            await asyncio.wait_for(source.run(0.1), 30)
        assert state.trouble == ""


@asynccontextmanager
async def running_source(target, monkeypatch):
    """What a source that asks again and again tells; it gives up connecting after a moment."""
    monkeypatch.setattr("paceline_cli.top.source._CONNECT_SECONDS", 0.3)
    async with source_of(target) as (source, state):
        running = asyncio.create_task(source.run(0.05))
        try:
            yield state
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_scheduler_that_comes_back_is_found(monkeypatch):
    async with (
        server(EXECUTOR) as served,
        through_a_proxy(served) as proxy,
        running_source(proxy.address, monkeypatch) as state,
    ):
        await wait_until(lambda: state.server, 30)
        proxy.become(LinkState(refuses=True))
        proxy.cut()
        await wait_until(lambda: state.trouble, 30)
        proxy.become(LinkState())
        await wait_until(lambda: not state.trouble, 30)


async def test_the_scheduler_that_takes_over_from_one_that_is_gone_is_found(monkeypatch):
    async with (
        server(EXECUTOR) as active,
        server(HELD) as standby,
        through_a_proxy(active) as proxy,
        running_source(f"{standby.address},{proxy.address}", monkeypatch) as state,
    ):
        await wait_until(lambda: state.server == proxy.address, 30)
        proxy.become(LinkState(refuses=True))
        proxy.cut()
        standby.backend.known_executors = (EXECUTOR,)
        await wait_until(lambda: (state.server, state.overview.holder, state.trouble) == (standby.address, "", ""), 30)


async def test_bounds_and_drains_reach_the_scheduler():
    async with server(EXECUTOR) as served, source_of(served.address) as (source, _):
        changed = await source.call(lambda on, seconds: wire.set_limit(on, "max_num_queued_reqs", 7, seconds))
        assert (
            changed
            == await source.call(wire.get_limits)
            == {
                "max_num_queued_reqs": 7,
                "max_num_queued_tokens": 4_194_304,
                "max_num_batched_tokens": 2048,
            }
        )
        with pytest.raises(InvalidRequestError, match="max_num_queued_reqs"):
            await source.call(lambda on, seconds: wire.set_limit(on, "max_num_queued_reqs", 2**40, seconds))
        await source.call(lambda on, seconds: wire.drain(on, EXECUTOR.address, seconds))
        await source.call(lambda on, seconds: wire.undrain(on, EXECUTOR.address, seconds))
        assert (served.backend.asked.drained, served.backend.asked.undrained) == ([EXECUTOR.address],) * 2
