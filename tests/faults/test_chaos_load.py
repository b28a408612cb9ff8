"""The load notices a wrong stream of a real server, whatever the client library thinks of it."""

import asyncio
import random

import pytest

from paceline_cli.chaos.faults import FaultKind, FaultTimes
from paceline_cli.chaos.ledger import ChaosLedger
from paceline_cli.chaos.load import ClosedLoopLoad, undisturbed_results
from paceline_cli.chaos.requests import ChaosRequest, chaos_requests
from paceline_client import AsyncClient, InvalidRequestError
from paceline_client.requests import Stopping
from paceline_client.testing import End, FakeServer, Tokens, say

REQUESTS = [ChaosRequest(name="story", prompt="Once", stopping=Stopping(max_tokens=3))]


async def run_load(script_of_load):
    """Run some streams of a load against a server that says `one two three` undisturbed: its ledger."""
    scripts = [say("one two three")]
    ledger = ChaosLedger(0.0)
    async with FakeServer(lambda _: scripts[-1]) as server, AsyncClient(server.target) as client:
        expected = await undisturbed_results(client, REQUESTS, "")
        scripts.append(script_of_load)
        load = ClosedLoopLoad(client, expected, REQUESTS, ledger, model="", num_streams=2, seed=1)
        running = asyncio.create_task(load.run())
        await server.seen_that(lambda seen: len(seen.requests) >= 4)
        load.stop()
        await asyncio.wait_for(running, 30)
    return ledger


async def test_streams_as_they_should_be_are_counted_and_clean():
    (window,) = (await run_load(say("one two three"))).windows
    assert window.num_done >= 3
    assert window.num_tokens == 3 * window.num_done
    assert (window.num_failed, bool(window.mismatches)) == (0, False)


async def test_a_stream_that_is_consistent_and_wrong_is_a_change():
    """Offsets and hashes are right, so only the comparison can tell."""
    wrong = [Tokens((0,), "one"), Tokens((7,), " two"), Tokens((2,), " three"), End()]
    (window,) = (await run_load(wrong)).windows
    assert window.mismatches.num_changed == window.num_done > 0
    assert window.mismatches.first == "story: at offset 1 came (7,), not (1,)"


async def test_a_stream_that_the_client_library_refuses_is_a_failure():
    ledger = await run_load([Tokens((0,), "one"), Tokens((2,), " three", offset_error=1), End()])
    (window,) = ledger.windows
    assert window.num_done == 0
    assert window.failures.keys() == {"StreamCorruptedError"}


def test_the_requests_are_as_different_as_the_api_lets_them_be():
    """Each has its name, and is greedy or has a seed: nothing else can be compared."""
    requests = chaos_requests(48, has_forms=True, has_tools=True)
    assert len({request.name for request in requests}) == len(requests) == 32
    assert all(request.sampling.temperature == 0 or request.sampling.seed is not None for request in requests)
    assert sum(request.sampling.temperature == 0 for request in requests) >= 8
    assert any(request.sampling.n for request in requests)
    assert any(request.stopping.stop for request in requests)


async def test_without_an_undisturbed_output_there_is_no_load():
    refused = [ChaosRequest(name="none", stopping=Stopping(max_tokens=1))]
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidRequestError):
            await undisturbed_results(client, refused, "")


@pytest.mark.parametrize("kind", FaultKind)
def test_a_fault_lasts_as_long_as_its_kind_may(kind):
    times = FaultTimes(freezes=(1.0,), links=(2.0,), rivals=(3.0,))
    seconds = times.draw(kind, random.Random(1)).seconds  # noqa: S311  repeatable
    assert seconds == (1.0 if "freeze" in kind else 3.0 if kind == "rival" else 2.0)
