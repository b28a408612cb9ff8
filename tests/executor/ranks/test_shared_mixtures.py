"""Mixtures of experts that ranks share: their tokens are those of one rank, and who has what."""

from dataclasses import replace

import numpy as np
import pytest

from executor_rig.cpu import cpu_runner
from executor_rig.driving import Draw, Driver
from joined_ranks import joined_ranks
from paceline_executor.errors import LimitError
from paceline_executor.weights.checkpoint import Mixture
from paceline_executor.weights.sharded import ShardedCheckpoint, check_degree
from paceline_executor.weights.shares import num_slices, shares_whole_experts
from paceline_kernels.routing import Routing, Score
from random_models import TINY_CONFIG, RandomCheckpoint

BASE = replace(TINY_CONFIG, num_kv_heads=4, tie_word_embeddings=False)


def mixture(routing, size, *, shared_size=0, has_shared_gate=False, sparse=(True, True), **more):
    """A tiny model of two layers, that many of which are sparse."""
    experts = Mixture(routing, size, sparse, shared_size, has_shared_gate)
    return replace(BASE, experts=experts, **more)


GLM = Routing(8, 2, Score.SIGMOID, scaling=2.5, has_bias=True, num_groups=4, top_groups=2)
MIXTURES = {
    "mixtral": mixture(Routing(4, 2), 1024),
    "qwen3_moe": mixture(Routing(8, 3, renormalises=False), 48, qk_norm=True),
    "qwen2_moe": mixture(Routing(8, 3, renormalises=False), 48, shared_size=80, has_shared_gate=True, qkv_bias=True),
    "glm4_moe": mixture(GLM, 48, shared_size=48, sparse=(False, True)),
}


def drawn_by(runner):
    """Rows in chunks, greedy and seeded, together."""
    driver = Driver(runner, seed=1)
    draws = Draw(num_logprobs=4), Draw(temperature=0.9, top_p=0.95, seed=7, num_logprobs=4)
    prompts = [np.random.default_rng(size).integers(0, 272, size).tolist() for size in (23, 3)]
    rows = [driver.add(prompt, draw, max_chunk=11) for prompt, draw in zip(prompts, draws, strict=True)]
    driver.run(rows, 8)
    return [(row.output, row.logprobs) for row in rows]


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_draw_the_tokens_of_one(name):
    """Log-probabilities have the same bits."""
    checkpoint = RandomCheckpoint(MIXTURES[name])
    expected = drawn_by(cpu_runner(checkpoint, num_blocks=16, block_size=16))
    for degree in (2, 4):
        runner, steps = joined_ranks(checkpoint, degree, num_blocks=16)
        assert drawn_by(runner) == expected
        assert all(drawn == [drawn[0]] * degree for drawn in steps())


@pytest.mark.parametrize("name", MIXTURES)
def test_parts_are_the_whole_when_put_together(name):
    """A rank has all of an expert, or as much of it as the others; routers and the gate of a shared expert are
    everywhere.
    """
    whole = RandomCheckpoint(MIXTURES[name])
    parts = [ShardedCheckpoint(whole, rank, 2) for rank in range(2)]
    for tensor, shape in whole.config.tensor_shapes().items():
        tensors = [part.tensor(tensor) for part in parts if tensor in part.config.tensor_shapes()]
        assert len(tensors) == (1 if ".experts." in tensor and name != "mixtral" else 2)
        axis = next((axis for axis, size in enumerate(shape) if tensors[0].shape[axis] != size), None)
        put_together = tensors[0] if axis is None else np.concatenate(tensors, axis)
        np.testing.assert_array_equal(put_together, whole.tensor(tensor))
        assert axis is None or "mlp.gate." not in tensor


@pytest.mark.parametrize(
    ("num_heads", "num_experts", "size", "shared_size", "parts", "by_experts"),
    [
        pytest.param(32, 8, 14_336, 0, 8, False, id="Mixtral 8x7B: slices of 1,792"),
        pytest.param(32, 128, 768, 0, 8, True, id="Qwen3-30B-A3B: 96 would be narrow"),
        pytest.param(64, 128, 1536, 0, 8, True, id="Qwen3-235B-A22B"),
        pytest.param(28, 64, 2560, 20_480, 4, False, id="Qwen2-57B-A14B: slices of 640"),
        pytest.param(16, 60, 1408, 5632, 4, True, id="Qwen1.5-MoE-A2.7B: 60 experts"),
        pytest.param(96, 128, 1408, 1408, 8, True, id="GLM-4.5-Air"),
    ],
)
def test_what_ranks_share_is_a_models_alone(num_heads, num_experts, size, shared_size, parts, by_experts):
    """Part of a rank or whole, it is the same."""
    routing = Routing(num_experts, 2)
    config = mixture(routing, size, shared_size=shared_size, num_heads=num_heads, intermediate_size=7)
    of_rank = ShardedCheckpoint(RandomCheckpoint(config), 1, 4).config
    for each in (config, of_rank):
        assert (num_slices(each), shares_whole_experts(each)) == (parts, by_experts)


REFUSED = {
    "experts": (MIXTURES["qwen3_moe"], 3, "4 attention heads and 4 KV heads, 8 experts: 2, 4 are possible"),
    "a shared expert": (
        mixture(Routing(6, 2), 48, shared_size=50),
        4,
        "4 attention heads and 4 KV heads, 6 experts, a shared expert's of 50 outputs: 2 is possible",
    ),
    "parts of experts": (
        mixture(Routing(6, 2), 1026),
        4,
        "4 attention heads and 4 KV heads, experts' gates and ups of 1026 outputs: 2 is possible",
    ),
    "a dense layer": (
        mixture(Routing(8, 2), 48, sparse=(False, True), intermediate_size=98),
        4,
        "4 attention heads and 4 KV heads, gates and ups of 98 outputs: 2 is possible",
    ),
    "norms over heads": (
        mixture(Routing(8, 2), 48, qk_norm=True, qk_norm_spans_heads=True),
        2,
        "queries and keys of all heads are normalised together: leave it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_number_of_ranks_that_cannot_share_a_mixture_is_refused(case):
    config, degree, sentence = REFUSED[case]
    with pytest.raises(LimitError) as refused:
        check_degree(RandomCheckpoint(config), degree)
    assert str(refused.value) == f"--tensor-parallel-size {degree}: {sentence}"
