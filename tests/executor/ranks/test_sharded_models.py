"""Models whose layers ranks share: their tokens are those of one rank, and which numbers of ranks are refused."""

from dataclasses import replace

import numpy as np
import pytest

from drafting.serving import serve
from executor_rig.cpu import cpu_rig, cpu_runner
from executor_rig.driving import Draw, Driver
from executor_rig.forms import letter_forms, regex
from executor_rig.plans import GREEDY as PLAIN
from executor_rig.plans import placement
from joined_ranks import joined_ranks
from paceline_executor.errors import LimitError
from paceline_executor.link.engine import Engine
from paceline_executor.rows.table import RowTable
from paceline_executor.weights.sharded import ShardedCheckpoint, check_degree
from paceline_executor.weights.shares import num_slices
from random_models import FAMILY_CONFIGS, TINY_CONFIG, RandomCheckpoint

SEEDED = Draw(temperature=0.9, top_p=0.95, seed=123456789012345678, num_logprobs=4)
GREEDY = Draw(num_logprobs=4)
FILTERED = Draw(temperature=1.5, top_k=150, min_p=1e-6, seed=7, num_logprobs=200)


def drawn_by(runner):
    """Rows in chunks, greedy, seeded and filtered, together, then one that has copies of the blocks of the first."""
    driver = Driver(runner, seed=1)
    prompts = [np.random.default_rng(size).integers(0, 272, size).tolist() for size in (40, 17, 3)]
    draws = GREEDY, SEEDED, FILTERED
    rows = [driver.add(each, draw, max_chunk=11) for each, draw in zip(prompts, draws, strict=True)]
    driver.run(rows, 12)
    rows.append(driver.add([*prompts[0][:33], 5, 6, 7], SEEDED, max_chunk=9, shares=rows[0]))
    copies = [driver._free.pop() for _ in rows[-1].blocks]
    runner.copy_blocks(np.array(rows[-1].blocks, np.int32), np.array(copies, np.int32))
    rows[-1].blocks = copies
    driver.run(rows[-1:], 6)
    return rows


SHARED = {family: (config, (2, 4)) for family, config in FAMILY_CONFIGS.items()}
SHARED["of three heads"] = replace(FAMILY_CONFIGS["llama"], num_heads=3, num_kv_heads=3), (3,)


@pytest.mark.parametrize("case", SHARED)
def test_ranks_draw_the_tokens_of_one(case):
    """Of two, each has a KV head; of four, pairs have the same. No number divides the vocabulary evenly.

    Log-probabilities have the same bits.
    """
    config, degrees = SHARED[case]
    checkpoint = RandomCheckpoint(config)
    expected = drawn_by(cpu_runner(checkpoint, num_blocks=128, block_size=16))
    for degree in degrees:
        runner, steps = joined_ranks(checkpoint, degree)
        rows = drawn_by(runner)
        assert [row.output for row in rows] == [row.output for row in expected]
        assert [row.logprobs for row in rows] == [row.logprobs for row in expected]
        assert all(drawn == [drawn[0]] * degree for drawn in steps())


@pytest.mark.parametrize(
    ("num_heads", "intermediate_size", "slices"),
    [(9, 1536, 3), (32, 14_336, 8), (4, 96, 4), (14, 4864, 2), (1, 96, 1), (10, 17_920, 2), (5, 2560, 5), (9, 96, 3)],
)
def test_the_number_of_slices_is_a_models_alone(num_heads, intermediate_size, slices):
    """8 at most; an odd number of heads has its own."""
    assert num_slices(replace(TINY_CONFIG, num_heads=num_heads, intermediate_size=intermediate_size)) == slices


def test_rules_forms_drafts_and_log_probabilities_are_those_of_one():
    """What rows of an engine ask for, of their prompts, too; the drafts are right where the text repeats itself."""
    checkpoint, sizes = RandomCheckpoint(TINY_CONFIG), {"num_blocks": 64, "block_size": 16, "max_drafts": 4}
    alone, (runner, steps) = cpu_rig(checkpoint, **sizes), joined_ranks(checkpoint, 2, **sizes)
    ruled = replace(PLAIN, temperature=0.5, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=((3, 1.0),))
    asked = (
        {"num_logprobs": 3},
        {"num_prompt_logprobs": 1},
        {"sampling": ruled, "bad_words": [[7], [5, 6], [1, 2, 3]]},
        {"structured": regex("(ab[c-e]|fffffff){3,5}"), "end_token_ids": [7]},
    )
    forms = letter_forms(TINY_CONFIG.vocab_size, [7])
    requests = [placement(row, [5, 6] * (2 + 9 * row), max_tokens=24, **more) for row, more in enumerate(asked)]

    def served(runner):
        return serve(Engine(RowTable(alone.limits, forms), runner), requests, lambda _, step: 4 if step else 0)

    (expected, verified), (found, also) = served(alone.runner), served(runner)
    assert sum(step.accepted for step in verified) > 0
    assert also == verified
    for one, other in zip(expected, found, strict=True):
        assert (other.tokens, other.finish) == (one.tokens, one.finish)
        assert other.prompt_logprobs == one.prompt_logprobs
        assert [each[1] for each in other.logprobs] == [each[1] for each in one.logprobs]
    assert all(drawn == [drawn[0]] * 2 for drawn in steps())
    assert set(found[3].tokens) <= {*range(6), 7}


def test_parts_are_the_whole_when_put_together():
    """No weight is left out, none counts twice, and what is not cut is everywhere."""
    whole = RandomCheckpoint(replace(FAMILY_CONFIGS["llama"], num_kv_heads=4))
    parts = [ShardedCheckpoint(whole, rank, 2) for rank in range(2)]
    for name, shape in whole.config.tensor_shapes().items():
        tensors = [part.tensor(name) for part in parts]
        assert [tensor.shape for tensor in tensors] == [part.config.tensor_shapes()[name] for part in parts]
        axis = next((axis for axis, size in enumerate(shape) if tensors[0].shape[axis] != size), None)
        put_together = tensors[0] if axis is None else np.concatenate(tensors, axis)
        np.testing.assert_array_equal(put_together, whole.tensor(name))


REFUSED = {
    "the default model's heads": ((9, 3, 1536), 2, "9 attention heads and 3 KV heads: 3 is possible"),
    "heads of queries": ((4, 2, 96), 8, "4 attention heads and 2 KV heads: 2, 4 are possible"),
    "KV heads": ((12, 4, 96), 3, "12 attention heads and 4 KV heads: 2, 4, 12 are possible"),
    "gates": ((8, 8, 90), 4, "8 attention heads and 8 KV heads, gates and ups of 90 outputs: 2 is possible"),
    "everything": ((3, 3, 7), 3, "3 attention heads and 3 KV heads, gates and ups of 7 outputs: leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_number_of_ranks_that_cannot_share_a_model_is_refused(case):
    (num_heads, num_kv_heads, intermediate_size), degree, sentence = REFUSED[case]
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "intermediate_size": intermediate_size}
    with pytest.raises(LimitError) as refused:
        check_degree(RandomCheckpoint(replace(TINY_CONFIG, **sizes)), degree)
    assert str(refused.value) == f"--tensor-parallel-size {degree}: {sentence}"
