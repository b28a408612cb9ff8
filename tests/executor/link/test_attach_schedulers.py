"""Two schedulers and one executor, over real gRPC: terms, the line, takeovers."""

from dataclasses import replace

import grpc
import pytest

from hash_twin import TwinHashRunner
from paceline.v1 import plan_pb2
from paceline_executor.link.engine import Engine
from paceline_executor.rows.table import RowTable
from paceline_executor.testing.hash_executor import HASH_LIMITS, hash_executor, loaded, serving
from paceline_executor.testing.hash_runner import HashRunner, continuation
from paceline_executor.testing.plan_client import (
    attach_until,
    attached,
    beating,
    grants,
    hello,
    info_of,
    read,
    request,
    tokens_by_row,
    values_of,
)

pytestmark = pytest.mark.usefixtures("seen_or_hidden")

PROMPT = [5, 6, 7, 8, 9, 10]
DRIVER = hello("driver", 5)
TAKEOVER = hello("other", 6, takeover=True)


@pytest.fixture
async def executor():
    """Eight rows of 64 tokens, 32 blocks of 4."""
    async with hash_executor() as executor:
        yield executor


def _expected(num_tokens):
    return continuation(PROMPT, num_tokens, HASH_LIMITS.vocab_size)


def _placing():
    cells = [(0, index, index) for index in range(5)]
    return plan_pb2.BatchPlan(new_requests=[request(0, PROMPT)], grants=grants(cells))


async def _reason(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await awaitable
    return failure.value.code(), info_of(failure.value).reason


async def test_a_lower_term_is_refused_with_the_holders_name(executor):
    async with attached(executor.address, DRIVER) as client:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await attach_until(executor.address, "welcome", hello("other", 4))
        result = await client.run([(0, 6)], _placing())

    info = info_of(failure.value)
    assert (failure.value.code(), info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TERM_SUPERSEDED")
    assert (info.metadata["holder_scheduler_id"], info.metadata["holder_term"]) == ("driver", "5")
    assert tokens_by_row(result)[0] == _expected(1)


async def test_one_in_line_gets_the_executor_when_the_driver_leaves(executor):
    async with attached(executor.address, DRIVER) as client:
        await client.run([(0, 6)], _placing())
        async with beating(client.call):
            call, message = await attach_until(executor.address, "waiting", hello("other", 6))
        holder = message.waiting
    async with beating(call):
        while (message := await read(call)).WhichOneof("message") != "snapshot":
            pass
    call.cancel()

    assert (holder.holder_scheduler_id, holder.holder_term) == ("driver", 5)
    assert [row.num_computed_tokens for row in message.snapshot.rows] == [6]


async def test_a_device_that_never_ends_a_launched_step_cannot_be_taken_over(monkeypatch):
    """There is no boundary to take over at: UNAVAILABLE, and the next one may try."""
    inner = HashRunner(HASH_LIMITS.num_blocks, HASH_LIMITS.block_size, HASH_LIMITS.vocab_size)
    runner = TwinHashRunner(inner, HASH_LIMITS)
    gpu = replace(loaded(inner), engine=Engine(RowTable(HASH_LIMITS), runner))
    async with serving(lambda: gpu) as (_, address):
        async with attached(address, DRIVER) as client:
            with monkeypatch.context() as patch:
                patch.setattr("paceline_executor.link.plan_streams.MIN_STEP_BOUND_NS", 100_000_000)
                patch.setattr("paceline_executor.link.step_loop.MIN_STEP_BOUND_NS", 100_000_000)
                patch.setattr(runner.device, "poll", lambda: None)
                await client.step([(0, 6)], _placing())
                while not (await read(client.call)).heartbeat.running_step_id:
                    pass
                refusal = await _reason(attach_until(address, "welcome", TAKEOVER))
        async with attached(address, hello("next", 7)) as client:
            rows = client.rows

    assert refusal == (grpc.StatusCode.UNAVAILABLE, "STEP_WEDGED")
    assert [row.num_computed_tokens for row in rows] == [6]


async def test_the_driver_replaces_its_own_stream(executor):
    async with attached(executor.address, DRIVER) as old, attached(executor.address, DRIVER) as new:
        refusal = await _reason(old.result())
        result = await new.run([(0, 6)], _placing())

    assert refusal == (grpc.StatusCode.ABORTED, "EPOCH_ENDED")
    assert (new.welcome.epoch, values_of(result.num_accepted)) == (2, [1])
