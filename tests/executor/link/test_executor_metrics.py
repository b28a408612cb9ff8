"""What operators see of an executor: every metric exists, and moves when its subject does."""

import asyncio
from dataclasses import replace
from itertools import chain, repeat

import numpy as np

from executor_rig.hash_executor import HASH_LIMITS, loaded, serving
from executor_rig.hash_runner import HashRunner
from executor_rig.plan_client import attached, grants, request
from paceline.plan.values import FailedStep, StepResult, StepTimings
from paceline.process.metrics import Histogram
from paceline.v1 import plan_pb2
from paceline_executor.errors import PlanOrderError, StepFailedError
from paceline_executor.link.metrics import COUNTED, READ
from paceline_executor.link.step_loop import StepRefused

CONSTANT = {
    f"executor_{name}" for name in ("info", "weight_bytes", "ranks", "kv_blocks", "kv_cache_bytes")
}  # once loaded


def load():
    whole = loaded(HashRunner(HASH_LIMITS.num_blocks, HASH_LIMITS.block_size, HASH_LIMITS.vocab_size))
    ratios = chain((None,), repeat(2.5))
    return replace(whole, description=replace(whole.description, expert_load_ratio=lambda: next(ratios)))


def look(service):
    """All values by name."""
    return {reading.definition.name: dict(reading.values) for reading in service.metrics.read()}


def with_drafts(verified, accepted):
    """The result of a step whose rows had so many drafts and got so many tokens."""
    columns = [np.array(numbers, dtype=np.int32) for numbers in (range(len(verified)), accepted, [7] * sum(accepted))]
    finishes = np.zeros(len(verified), dtype=np.uint8)
    timings = StepTimings(draft_ns=250_000_000)
    return StepResult(1, 1, 1, *columns, finishes, 0, timings, num_draft_tokens=np.array(verified, dtype=np.int32))


def plain(values):
    """Values that can be compared."""
    return {labels: tuple(value.counts) if isinstance(value, Histogram) else value for labels, value in values.items()}


async def test_every_metric_exists_and_moves():
    async with serving(load) as (service, address):
        before = look(service)
        async with attached(address) as client:
            placing = plan_pb2.BatchPlan(new_requests=[request(0, [5, 6, 7])], grants=grants([(0, 0, 0)]))
            await client.run([(0, 3)], placing)
            await asyncio.sleep(0.01)
            await client.run([(0, 1)])
            service.metrics.saw(with_drafts(verified=(3, 1), accepted=(2, 2)))
            service.metrics.saw(StepRefused(1, PlanOrderError("out of order")))
            service.metrics.saw(StepRefused(1, StepFailedError("memory ran out"), FailedStep(1, 3, "memory ran out")))
            service.metrics.profiled({"qkv": 2e10})
            after = look(service)
    assert after.keys() == {definition.name for definition in (*READ, *COUNTED)}
    assert {name for name in after if plain(after[name]) == plain(before[name])} == CONSTANT
    assert [names[0] for names in after["executor_info"]] == ["hash"]
    assert after["executor_kv_blocks"][()] == HASH_LIMITS.num_blocks
    assert after["executor_rows_total"][()] == 4
    assert after["executor_generation_tokens_total"][()] == 6
    assert after["executor_draft_tokens_total"][()] == 4
    assert after["executor_accepted_draft_tokens_total"][()] == 2
    assert after["executor_draft_seconds_total"][()] == 0.25
    assert after["executor_refused_plans_total"][()] == 2
    assert after["executor_failed_steps_total"][()] == 1
    assert (before["executor_expert_load_ratio"], after["executor_expert_load_ratio"]) == ({}, {(): 2.5})
    assert (before["executor_is_driven"][()], after["executor_is_driven"][()]) == (0, 1)
    assert after["executor_epoch"][()] == before["executor_epoch"][()] + 1
    assert {labels[0]: sum(steps.counts) for labels, steps in after["executor_step_seconds"].items()} == dict.fromkeys(
        ("prepare", "forward", "sample"), 3
    )


async def test_idle_time_goes_on_between_steps():
    shown = []
    async with serving(load) as (service, address), attached(address) as client:
        placing = plan_pb2.BatchPlan(new_requests=[request(0, [5, 6, 7])], grants=grants([(0, 0, 0)]))
        await client.run([(0, 3)], placing)
        for _ in range(3):
            shown += [look(service)["executor_idle_seconds_total"][()]]
            await asyncio.sleep(0.02)
        await client.run([(0, 1)])
        shown += [look(service)["executor_idle_seconds_total"][()]]
    assert shown == sorted(shown)
    assert shown[2] - shown[0] >= 0.03
