"""The same over gRPC and real sockets: what the simulated network leaves out."""

import contextlib

import pytest

from paceline_scheduler.link.messages import ExecutorState
from paceline_scheduler.link.transport_grpc import GrpcTransport
from paceline_scheduler.simulator.fence import Approach
from paceline_scheduler.simulator.server import SimulatedServer, server_config
from paceline_scheduler.testing.requests import expected_output, make_request
from paceline_scheduler.testing.rig import SchedulerRig

CONFIG = server_config(num_blocks=256, max_num_rows=16)


@contextlib.asynccontextmanager
async def servers(number):
    """Run simulated executors on free ports."""
    running = [await SimulatedServer.start(CONFIG) for _ in range(number)]
    try:
        yield running
    finally:
        for server in running:
            await server.stop()
    assert [violation for server in running for violation in server.service.violations] == []


def rig_for(*running, **options):
    """Return a scheduler for these executors."""
    return SchedulerRig(",".join(server.address for server in running), GrpcTransport(), **options)


def assert_right_tokens(rig, requests):
    """Every request ended, with the tokens of the reference."""
    assert rig.client.failures == {}
    for request in requests:
        assert tuple(rig.client.token_ids[request.handle]) == expected_output(request, CONFIG.tokens)


async def test_64_requests_of_mixed_lengths_all_get_the_right_tokens():
    """Two executors, more requests than rows, streams that break in between."""
    async with servers(2) as (first, second), rig_for(first, second) as rig:
        await rig.until_ready(2)
        requests = [make_request(3 + 5 * (number % 12), 4 + number % 29) for number in range(64)]
        rig.submit(*requests)
        await rig.until(lambda: len(rig.client.ended) > 5)
        first.service.break_stream()
        await rig.until(lambda: len(rig.client.ended) > 25)
        second.service.break_stream()
        await rig.until_idle()
        assert_right_tokens(rig, requests)


async def test_an_executor_that_restarts_is_attached_as_another_incarnation():
    """What it had forgotten is sent again."""
    async with servers(1) as (server,), rig_for(server) as rig:
        await rig.until_ready()
        before = rig.executors.statuses()[0].incarnation
        requests = [make_request(40, 30) for _ in range(4)]
        rig.submit(*requests)
        await rig.until(lambda: len(rig.client.token_ids) == 4)
        server.service.restart()
        await rig.until_idle()
        assert_right_tokens(rig, requests)
        assert rig.executors.statuses()[0].incarnation == before + 1


async def test_a_refused_connection_is_told_at_once_and_tried_again():
    """The executor may come later, at the same address."""
    server = await SimulatedServer.start(CONFIG)
    port = server.port
    await server.stop()
    async with rig_for(server) as rig:
        await rig.until(lambda: rig.states().get(server.address) is ExecutorState.LOST)
        assert "refused" in rig.executors.statuses()[0].last_error.lower()
        late = await SimulatedServer.start(CONFIG, port)
        await rig.until_ready()
        await late.stop()


async def test_the_holder_of_a_higher_term_is_told_from_an_end_of_the_stream():
    """TERM_SUPERSEDED crosses the wire with the holder's name and term."""
    async with servers(1) as (server,), rig_for(server) as rig:
        await rig.until_ready()
        request = make_request(5, 1000)
        rig.submit(request)
        server.service.hello("scheduler-z", 9, Approach.TAKE_OVER)
        await rig.until(lambda: request.handle in rig.client.failures)
        assert "scheduler-z" in str(rig.client.failures[request.handle])
        assert rig.leadership.claim.term == 10


async def test_the_tokenizer_arrives_whole_over_many_parts():
    """The parts are joined in order."""
    async with servers(1) as (server,), rig_for(server) as rig:
        await rig.until_ready()
        tokenizer = rig.executors.models()[0].tokenizer
        assert tokenizer.json == server.servicer._tokenizer.json
        assert tokenizer.end_token_ids == (258, 256)


async def test_a_plan_that_breaks_a_rule_ends_the_stream_and_the_link_recovers():
    """A mistake of ours is repaired from the snapshot like everything else."""
    async with await SimulatedServer.start(CONFIG) as server, rig_for(server) as rig:
        await rig.until_ready()
        requests = [make_request(9, 40)]
        rig.submit(*requests)
        await rig.until(lambda: bool(rig.client.token_ids))
        rig.runtime.views.executor(server.address)._next_step_id += 1  # a gap
        await rig.until_idle()
        assert_right_tokens(rig, requests)
    assert server.service.violations[0].startswith("no gap between plans")


@pytest.mark.parametrize("number", [0, 3])
async def test_nothing_is_left_behind_when_the_links_stop(number):
    """Streams are cancelled, so the executor is free for another scheduler at once."""
    async with servers(1) as (server,):
        async with rig_for(server) as rig:
            await rig.until_ready()
            rig.submit(*(make_request(5, 500) for _ in range(number)))
        async with rig_for(server, scheduler_id="scheduler-b") as other:
            await other.until_ready()
