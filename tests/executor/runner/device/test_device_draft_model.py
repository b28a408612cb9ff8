"""A draft model on a device, on its twin: it drafts what it drafts on a CPU, and first computes what it lacks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline_executor.device_numerics import TWIN_NUMERICS
from paceline_executor.link.engine import Engine
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.runner.cuda import DeviceRunner
from paceline_executor.runner.device.buckets import buckets_of
from paceline_executor.runner.device.draft_model import _shares, drafting_by_model
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_executor.speculation.draft_model import DraftModel
from paceline_executor.testing.drafters import UpTo
from paceline_executor.testing.models import TINY_CONFIG, RandomCheckpoint
from paceline_executor.testing.plans import GREEDY, placement, plan
from paceline_executor.testing.random_plans import LIMITS as PLAIN_LIMITS
from paceline_kernels.attention import Splits

MAX_DRAFTS = 5
LIMITS = replace(PLAIN_LIMITS, max_model_len=48, max_num_draft_tokens=MAX_DRAFTS)
CONFIG = replace(TINY_CONFIG, vocab_size=LIMITS.vocab_size)
TARGET = RandomCheckpoint(CONFIG)
FEW = (1, 2, 3)  # so that two models agree often enough
SEEDED = replace(GREEDY, temperature=1.0, seed=7, allowed_token_ids=FEW)
CELLS = [(0, cell, cell) for cell in range(LIMITS.max_blocks_per_row)]


def drafting(checkpoint, max_model_len=LIMITS.max_model_len):
    """By this model, with a KV cache of its own."""
    model, device = LlamaModel(HostWeights(checkpoint), LIMITS.max_model_len), torch.device("cpu")
    return drafting_by_model(model, checkpoint.config, TWIN_NUMERICS, LIMITS, max_model_len, Splits.EVEN, device)


def device_engine(checkpoint, **limits):
    """On the twin."""
    geometry = kv_geometry(CONFIG, LIMITS.num_blocks, LIMITS.block_size, FLOAT32_NUMERICS)
    runner = DeviceRunner(
        TwinDevice(),
        LlamaModel(HostWeights(TARGET), LIMITS.max_model_len),
        allocate_kv_cache(geometry, FLOAT32_NUMERICS.kv),
        geometry,
        LIMITS,
        buckets=buckets_of(LIMITS.num_rows, LIMITS.max_num_batched_tokens, MAX_DRAFTS),
        drafting=drafting(checkpoint, **limits),
    )
    runner.warm_up()
    return Engine(RowTable(LIMITS), runner)


def cpu_engine(checkpoint):
    """The same two models on the CPU."""
    sizes = {"num_blocks": LIMITS.num_blocks, "block_size": LIMITS.block_size, "num_threads": 1}
    drafter = DraftModel(
        CpuRunner(checkpoint, **sizes),
        max_model_len=LIMITS.max_model_len,
        vocab_size=checkpoint.config.vocab_size,
        catch_up=UpTo(1000),
    )
    return Engine(RowTable(LIMITS, drafter), CpuRunner(TARGET, **sizes))


def run(engine, drafts, *, sampling=SEEDED, prompt=(1, 2, 3), **asked):
    """Drafts verified and tokens brought of each step, and all tokens; drafts: how many each step may have."""
    asked = {"max_tokens": 40, "sampling": sampling, **asked}
    contents, num_tokens, told, tokens = (
        {"place": [placement(0, prompt, **asked)], "grants": CELLS},
        len(prompt),
        [],
        [],
    )
    for wanted in drafts:
        planned = plan([(0, num_tokens + wanted)], drafts=[wanted] if wanted else (), **contents)
        result = engine.collect(engine.launch(planned))
        told.append((int(result.num_draft_tokens.sum()), int(result.num_accepted[0])))
        tokens += result.token_ids.tolist()
        contents, num_tokens = {}, 1
    return told, tokens


SMALLER = RandomCheckpoint(replace(CONFIG, num_layers=1), seed=5)


@pytest.mark.parametrize("sampling", [SEEDED, replace(GREEDY, allowed_token_ids=FEW, repetition_penalty=1.3)])
def test_a_device_drafts_what_a_cpu_drafts(sampling):
    """Another model, one in two or three of whose drafts is right: each step verifies and accepts as many."""
    steps = [0, 1, 2, 5, 3, 0, 4, 1, 2, 5]
    on_device, expected = (run(engine(SMALLER), steps, sampling=sampling) for engine in (device_engine, cpu_engine))

    assert on_device == expected
    verified, brought = (sum(column) for column in zip(*on_device[0], strict=True))
    assert 0 < brought - len(steps) < verified


def test_a_row_is_caught_up_before_it_has_drafts():
    """Behind steps without drafts, and behind a prompt that is longer than a step."""
    engine = device_engine(TARGET)
    told, _ = run(engine, [0] * 12 + [5, 5])
    assert told[12:] == [(5, 6), (5, 6)]

    contents = {"place": [placement(1, [1, 2] * 12, max_tokens=20, sampling=SEEDED)], "preempt": [0]}
    cells = [(1, cell, cell) for cell in range(LIMITS.max_blocks_per_row)]
    engine.collect(engine.launch(plan([(1, 16)], grants=cells, **contents)))
    results = [engine.collect(engine.launch(plan([(1, 8)])))]
    results += [engine.collect(engine.launch(plan([(1, 4)], drafts=[3]))) for _ in range(3)]
    assert [int(result.num_draft_tokens.sum()) for result in results] == [0, 0, 0, 3]
    assert [int(result.num_accepted[0]) for result in results] == [1, 1, 1, 4]


def test_no_drafts_where_the_model_does_not_reach():
    """Rows longer than it knows positions for go on by a token; the last one that it computes is drafted behind."""
    told, _ = run(device_engine(TARGET, max_model_len=8), [0, 3, 3, 3])
    assert told == [(0, 1), (3, 4), (1, 2), (0, 1)]


@pytest.mark.parametrize("vocab_size", [40, 64])
def test_another_vocabulary_costs_drafts_alone(vocab_size):
    """Of ids that only one of the two has none is drafted, or none is right."""
    steps = [0, 3, 3, 3, 3]
    plain = run(cpu_engine(TARGET), [0] * 17, sampling=replace(SEEDED, allowed_token_ids=()), prompt=[45, 49, 1])
    checkpoint = RandomCheckpoint(replace(CONFIG, vocab_size=vocab_size), seed=5)
    sampling = replace(SEEDED, allowed_token_ids=())
    told, tokens = run(device_engine(checkpoint), steps, sampling=sampling, prompt=[45, 49, 1])
    assert tokens == plain[1][: len(tokens)]
    assert sum(verified for verified, _ in told) > 0


def test_no_end_token_is_drafted():
    _, tokens = run(cpu_engine(TARGET), [0] * 6)
    end = tokens[5]
    first = tokens.index(end)
    told, ended = run(device_engine(TARGET), [0, 5] if first else [0], end_token_ids=(end,))
    assert ended == tokens[: first + 1]
    assert told[-1] == (max(0, first - 1), first if first else 1)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 6), st.integers(1, 64))
def test_a_step_computes_no_more_than_it_has_room_for_and_the_nearest_first(behind, most_near, num_tokens):
    """Rows that drafted in the step before all they lack, as far as there is room for them."""
    shares = _shares(torch.tensor(behind), most_near, num_tokens, None).numpy()
    near = np.minimum(behind, most_near)

    assert shares.sum() == min(sum(behind), num_tokens)
    assert (shares <= behind).all()
    if near.sum() <= num_tokens:
        assert (shares >= near).all()
