"""A GPU's memory: nothing beyond its share, more memory is never worth less, and what does not fit says what to do."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.values import MAX_BLOCKS
from paceline_executor.errors import ShortMemoryError
from paceline_executor.runner.device.memory_plan import (
    BlockNeeds,
    DeviceMemory,
    MemoryUses,
    activation_bytes,
    graph_bytes,
    plan_memory,
)
from random_models import TINY_CONFIG

MIB = 2**20
GIB = 2**30
GPU = DeviceMemory(total_bytes=80 * GIB, free_bytes=79 * GIB)
USES = MemoryUses(weights=16 * GIB, activations=2 * GIB, rows=GIB, rings=0, graphs=GIB)
NEEDS = BlockNeeds(bytes_per_block=2 * MIB, min_blocks=4, max_blocks=MAX_BLOCKS)

sizes = st.integers(0, 40 * GIB)
memories = st.tuples(st.integers(1, 200 * GIB), st.integers(0, 200 * GIB)).map(lambda s: DeviceMemory(s[0], min(s)))
uses = st.builds(MemoryUses, weights=sizes, activations=sizes, rows=sizes, rings=sizes, graphs=sizes)
needs = st.builds(BlockNeeds, st.integers(1, 64 * MIB), st.integers(1, 100), st.integers(100, 2 * MAX_BLOCKS))
shares = st.floats(0.01, 1.0)


def num_blocks(*arguments):
    """How many there are; none where it is refused."""
    try:
        return plan_memory(*arguments).num_blocks
    except ShortMemoryError:
        return 0


@given(memories, shares, uses, needs, st.none() | sizes)
def test_all_parts_together_stay_within_the_share_and_within_what_is_free(memory, share, uses, needs, kv_bytes):
    """And there are no more blocks than rows fill, or the protocol has numbers for, and never too few for a request."""
    try:
        plan = plan_memory(memory, share, uses, needs, kv_bytes)
    except ShortMemoryError:
        return
    assert sum(plan.table.values()) <= min(memory.total_bytes * share, memory.free_bytes)
    assert plan.table["kv_cache"] == plan.num_blocks * needs.bytes_per_block
    assert needs.min_blocks <= plan.num_blocks <= min(MAX_BLOCKS, needs.max_blocks)
    assert kv_bytes is None or plan.table["kv_cache"] <= kv_bytes


@given(memories, shares, uses, needs, st.integers(0, 10 * GIB), st.floats(0, 0.5))
def test_more_memory_a_larger_share_and_smaller_parts_give_no_fewer_blocks(memory, share, uses, needs, more, further):
    before = num_blocks(memory, share, uses, needs)
    larger = DeviceMemory(memory.total_bytes + more, memory.free_bytes + more)
    smaller = replace(uses, weights=max(0, uses.weights - more))

    assert num_blocks(larger, share, uses, needs) >= before
    assert num_blocks(memory, share + further, uses, needs) >= before
    assert num_blocks(memory, share, smaller, needs) >= before


@given(memories, shares, uses, needs)
def test_what_is_left_is_less_than_a_block_unless_blocks_would_be_of_no_use(memory, share, uses, needs):
    try:
        plan = plan_memory(memory, share, uses, needs)
    except ShortMemoryError:
        return
    left = min(int(memory.total_bytes * share), memory.free_bytes) - sum(plan.table.values())
    assert left < needs.bytes_per_block or plan.num_blocks == min(MAX_BLOCKS, needs.max_blocks)


def test_the_rest_of_the_share_goes_to_the_kv_cache():
    """72 GiB of 80, of which 20 are taken: 52 GiB in blocks of 2 MiB."""
    plan = plan_memory(GPU, 0.9, USES, NEEDS)
    assert plan.num_blocks == 52 * 512
    assert plan.table == {
        "weights": 16 * GIB,
        "activations": 2 * GIB,
        "rows": GIB,
        "rings": 0,
        "graphs": GIB,
        "kv_cache": 52 * GIB,
    }


def test_the_kv_cache_takes_what_is_asked_for():
    """Instead of the rest."""
    assert plan_memory(GPU, 0.9, USES, NEEDS, 3 * GIB).num_blocks == 3 * 512


@pytest.mark.parametrize(
    ("memory", "uses", "kv_bytes", "sentence"),
    [
        (GPU, replace(USES, weights=90 * GIB), None, "; take another, or raise --gpu-memory-utilization"),
        (GPU, replace(USES, activations=90 * GIB), None, "lower --max-num-batched-tokens"),
        (GPU, replace(USES, rows=90 * GIB), None, "lower --max-model-len"),
        (GPU, replace(USES, graphs=90 * GIB), None, "lower --max-num-batched-tokens"),
        (replace(GPU, free_bytes=GIB), USES, None, "1,024 MiB that are free .* end other processes on the GPU"),
        (GPU, USES, 60 * GIB, "lower --kv-cache-memory, or raise --gpu-memory-utilization"),
        (replace(GPU, free_bytes=30 * GIB), USES, 20 * GIB, "lower --kv-cache-memory, or end other processes"),
        (GPU, USES, MIB, "0 blocks, and a request takes 4; raise --kv-cache-memory"),
        (GPU, replace(USES, weights=68 * GIB), None, "0 blocks, .* raise --gpu-memory-utilization"),
    ],
)
def test_what_does_not_fit_says_what_to_lower(memory, uses, kv_bytes, sentence):
    with pytest.raises(ShortMemoryError, match=sentence):
        plan_memory(memory, 0.9, uses, NEEDS, kv_bytes, lambda: "take another")


def test_a_step_takes_its_layers_widest_moment_and_its_logits():
    """Counted by hand: 5 tokens of 3 * 64 + 3 * 96 numbers and 96 bytes, 2 draws, an eighth more."""
    by_hand = 5 * ((3 * 64 + 3 * 96) * 2 + 96) + 2 * 272 * (2 + 8) + 16 * MIB
    assert activation_bytes(TINY_CONFIG, 5, 2, 2) == by_hand + by_hand // 8


@given(st.integers(1, 4096), st.integers(1, 512))
def test_larger_steps_take_more(num_tokens, num_draws):
    """In tokens and in draws; in float32, too."""
    size = partial(activation_bytes, TINY_CONFIG)
    assert size(num_tokens, num_draws, 2) < size(num_tokens + 1, num_draws, 2)
    assert size(num_tokens, num_draws, 2) < size(num_tokens, num_draws + 1, 2)
    assert size(num_tokens, num_draws, 2) < size(num_tokens, num_draws, 4)


def test_captured_steps_share_the_memory_of_the_largest():
    assert MIB < graph_bytes(GIB, 24 * [MIB]) - graph_bytes(GIB, 23 * [MIB]) < 10 * MIB
    assert graph_bytes(2 * GIB, 24 * [MIB]) - graph_bytes(GIB, 24 * [MIB]) == GIB
