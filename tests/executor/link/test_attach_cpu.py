"""The plan stream with the CPU runner and a tiny model: how plans are cut and queued does not change a token."""

import asyncio

import pytest

from paceline.v1 import plan_pb2, sampling_pb2
from paceline_executor.limits import RowLimits
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.testing.driving import Driver
from paceline_executor.testing.hash_executor import loaded, serving
from paceline_executor.testing.models import tiny_checkpoint
from paceline_executor.testing.plan_client import attached, grants, hello, request, tokens_by_row, values_of

LIMITS = RowLimits(
    num_rows=4, max_model_len=128, max_num_batched_tokens=64, num_blocks=24, block_size=8, vocab_size=512
)
PROMPT = [(7 * i * i + 3) % 512 for i in range(29)]
NUM_TOKENS = 10


def _runner():
    return CpuRunner(tiny_checkpoint(), num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size)


@pytest.fixture
async def address():
    """An executor with the tiny model."""
    async with serving(lambda: loaded(_runner(), LIMITS)) as (_, address):
        yield address


@pytest.fixture(scope="module")
def expected():
    """The greedy output of the tiny model, from a runner driven without rows and plans."""
    driver = Driver(_runner())
    row = driver.add(PROMPT, max_chunk=64)
    driver.run([row], NUM_TOKENS)
    return row.output


def _placing(row=0, first_block=0, **options):
    cells = [(row, index, first_block + index) for index in range(5)]
    return plan_pb2.BatchPlan(new_requests=[request(row, PROMPT, **options)], grants=grants(cells))


async def _generate(client, chunks, num_ahead, num_tokens, row=0, **options):
    """Place the prompt, compute it in chunks, decode; with up to `num_ahead` plans unanswered."""
    output, in_flight = [], 0
    for number, num_scheduled in enumerate([*chunks, *[1] * (num_tokens - 1)]):
        await client.step([(row, num_scheduled)], _placing(row, **options) if number == 0 else None)
        in_flight += 1
        if in_flight == num_ahead:
            output += tokens_by_row(await client.result())[row]
            in_flight -= 1
    for _ in range(in_flight):
        output += tokens_by_row(await client.result())[row]
    return output


@pytest.mark.parametrize("num_ahead", [1, 2, 4])
async def test_planning_ahead_changes_no_token(address, expected, num_ahead):
    """The executor feeds each token back by itself."""
    async with attached(address) as client:
        assert await _generate(client, [29], num_ahead, NUM_TOKENS) == expected


@pytest.mark.parametrize("chunks", [[1] * 29, [7] * 4 + [1], [16, 13]], ids=["1", "7", "16"])
async def test_chunks_change_no_token(address, expected, chunks):
    async with attached(address) as client:
        assert await _generate(client, chunks, 2, NUM_TOKENS) == expected


async def test_a_broken_stream_changes_no_token(address, expected):
    async with attached(address) as client:
        await _generate(client, [29], 1, 3)
        await client.step([(0, 1)])
        await client.step([(0, 1)])
    async with attached(address) as client:
        (row,) = client.rows
        output = values_of(row.output_token_ids)
        while len(output) < NUM_TOKENS:
            output += tokens_by_row(await client.run([(0, 1)]))[0]

    assert output == expected


async def test_a_request_placed_again_with_its_output_continues_the_same(address, expected):
    async with attached(address) as client:
        await _generate(client, [29], 2, 4)
        await client.run((), plan_pb2.BatchPlan(releases=[plan_pb2.Release(row=0)]))
        cells = [(1, index, 10 + index) for index in range(5)]
        again = request(1, PROMPT, request_id="request-0", output=expected[:4], attempt=2)
        plan = plan_pb2.BatchPlan(new_requests=[again], grants=grants(cells))
        output = tokens_by_row(await client.run([(1, 33)], plan))[1]
        while len(output) < NUM_TOKENS - 4:
            output += tokens_by_row(await client.run([(1, 1)]))[1]

    assert output == expected[4:]


async def test_a_seeded_request_draws_the_same_beside_others(address):
    seeded = sampling_pb2.SamplingParams(temperature=1.5, seed=11)
    async with attached(address) as client:
        alone = await _generate(client, [29], 2, 5, sampling=seeded)
        await client.run((), plan_pb2.BatchPlan(releases=[plan_pb2.Release(row=0)]))
        plan = plan_pb2.BatchPlan(
            new_requests=[
                request(1, PROMPT[:5]),
                request(2, PROMPT, sampling=seeded),
                request(3, PROMPT[3:9], sampling=sampling_pb2.SamplingParams(temperature=1, seed=5)),
            ],
            grants=grants([(row, index, 5 * (row - 1) + index) for row in (1, 2, 3) for index in range(5)]),
        )
        together = tokens_by_row(await client.run([(1, 5), (2, 29), (3, 6)], plan))[2]
        while len(together) < 5:
            together += tokens_by_row(await client.run([(1, 1), (2, 1), (3, 1)]))[2]

    assert together == alone


async def test_two_schedulers_in_turn_change_no_token(address, expected):
    async with attached(address, hello("first", 1)) as first:
        output = await _generate(first, [29], 2, 4)
        async with attached(address, hello("second", 2, takeover=True)) as second:
            (row,) = second.rows
            while len(output) < NUM_TOKENS:
                output += tokens_by_row(await second.run([(0, 1)]))[0]
            await asyncio.sleep(0)

    assert values_of(row.output_token_ids) == expected[:4]
    assert output == expected
