"""Drafts over the wire: what an executor says it verifies, what it takes, and what its results tell."""

from dataclasses import replace

import grpc
import pytest

from executor_rig.hash_executor import HASH_LIMITS, hash_executor, simulated_executor
from executor_rig.hash_runner import continuation
from executor_rig.plan_client import (
    attached,
    column,
    grants,
    info_of,
    request,
    tokens_by_row,
    values_of,
)
from executor_rig.plans import int32, placement, plan
from paceline.v1 import plan_pb2
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import StepOutput

LIMITS = replace(HASH_LIMITS, max_num_draft_tokens=3)
PROMPT = [5, 6, 7, 5, 6]


def placing():
    """A request on row 0, with room for eight tokens."""
    return plan_pb2.BatchPlan(
        new_requests=[request(0, PROMPT)], grants=grants([(0, 0, 3), (0, 1, 4)]), num_draft_tokens=column([3])
    )


async def test_results_say_how_many_drafts_were_verified():
    async with hash_executor(LIMITS) as executor, attached(executor.address) as client:
        assert client.welcome.limits.max_num_draft_tokens == 3
        await client.step([(0, 8)], placing())
        first = await client.result()
        more = plan_pb2.BatchPlan(num_draft_tokens=column([2]))
        await client.step([(0, 3)], more)
        second = await client.result()

    assert [values_of(result.num_draft_tokens) for result in (first, second)] == [[3], [0]]
    tokens = [tokens_by_row(result)[0] for result in (first, second)]
    assert tokens == [[token] for token in continuation(PROMPT, 2, LIMITS.vocab_size)]


async def test_a_plan_says_how_likely_drafts_have_to_be_right():
    """Behind a match of two tokens, every other one is: too few for this one."""
    plan = placing()
    plan.min_draft_chance = 0.75
    async with hash_executor(LIMITS) as executor, attached(executor.address) as client:
        await client.step([(0, 8)], plan)
        result = await client.result()
    assert values_of(result.num_draft_tokens) == [0]
    assert tokens_by_row(result)[0] == list(continuation(PROMPT, 1, LIMITS.vocab_size))


@pytest.mark.parametrize(
    ("scheduled", "drafts", "reason"),
    [
        (8, 4, "PLAN_DRAFTS"),  # more than it verifies
        (3, 3, "PLAN_DRAFTS"),  # nothing before them
        (7, 3, "PLAN_DRAFTS"),  # a known token behind them
        (9, 3, "PLAN_TOKENS_UNKNOWN"),
    ],
)
async def test_drafts_that_a_plan_cannot_have_end_the_stream(scheduled, drafts, reason):
    plan = placing()
    plan.num_draft_tokens = column([drafts])
    async with hash_executor(LIMITS) as executor, attached(executor.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.run([(0, scheduled)], plan)

    assert info_of(failure.value).reason == reason


@pytest.mark.parametrize(
    ("max_tokens", "cells", "reason"),
    [
        (3, [(0, 0, 3), (0, 1, 4)], "PLAN_DRAFTS"),  # no room for the token that is drawn behind them
        (4, [(0, 0, 3)], "PLAN_BLOCK_MISSING"),
    ],
)
async def test_a_row_has_room_for_its_drafts_and_a_token_more(max_tokens, cells, reason):
    plan = placing()
    plan.new_requests[0].max_tokens = max_tokens
    plan.grants.CopyFrom(grants(cells))
    async with hash_executor(LIMITS) as executor, attached(executor.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.run([(0, 8)], plan)

    assert info_of(failure.value).reason == reason


async def test_the_simulated_runner_verifies_eight_drafts():
    """As the CPU does: whatever drives executors can be tried without a model."""
    async with simulated_executor() as executor, attached(executor.address) as client:
        assert client.welcome.limits.max_num_draft_tokens == 8


def test_a_runner_is_told_how_many_drafts_it_may_find():
    """It says how many it found; a number that cannot be is refused, and changes nothing."""
    table = RowTable(LIMITS)
    cells = [(0, 0, 3), (0, 1, 4)]
    placing_one = plan([(0, 8)], drafts=[3], place=[placement(0, PROMPT)], grants=cells)
    launched = table.launch(placing_one, 0)
    batch = launched.prepared.batch
    assert batch.num_drafts.tolist() == [3]
    assert batch.num_tokens.tolist() == [len(PROMPT) + 3]

    def brought(num_verified):
        tokens, counts = int32([9, 8]), int32([2])
        return StepOutput(counts, tokens, None, {}, forward_ns=0, sample_ns=0, num_verified=int32([num_verified]))

    for impossible in (0, 4):
        with pytest.raises(ValueError, match="verified"):
            table.land(launched, brought(impossible))
    result = table.land(launched, brought(2))
    assert (result.num_draft_tokens.tolist(), result.num_accepted.tolist()) == ([2], [2])
    (state,) = table.states()
    assert (state.num_computed_tokens, state.output_token_ids.tolist()) == (len(PROMPT) + 1, [9, 8])
