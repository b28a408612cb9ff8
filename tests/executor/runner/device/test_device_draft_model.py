"""A draft model on a device, on its twin: it first computes what it lacks, and drafts no further than it reaches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafting.serving import serve
from drafting.targets import DEVICE_LIMITS, device_draft_model, device_runner
from paceline_executor.link.engine import Engine
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.runner.device.draft_model import _shares
from paceline_executor.testing.models import TINY_CONFIG, RandomCheckpoint
from paceline_executor.testing.plans import GREEDY, placement, plan

LIMITS = replace(DEVICE_LIMITS, max_model_len=48)
CONFIG = replace(TINY_CONFIG, vocab_size=LIMITS.vocab_size)
TARGET = RandomCheckpoint(CONFIG)
SEEDED = replace(GREEDY, temperature=1.0, seed=7, allowed_token_ids=(1, 2, 3))  # so that two models agree often enough


def device_engine(checkpoint, **limits):
    """On the twin, this model drafting."""
    drafting = device_draft_model(checkpoint, LIMITS, **limits)
    runner, _ = device_runner(drafting, checkpoint=TARGET, limits=LIMITS)
    return Engine(RowTable(LIMITS), runner)


def cpu_engine():
    """Nobody drafts."""
    runner = CpuRunner(TARGET, num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size, num_threads=1)
    return Engine(RowTable(LIMITS), runner)


def run(engine, drafts, *, sampling=SEEDED, prompt=(1, 2, 3), **asked):
    """Drafts verified and tokens brought of each step, and all tokens; drafts: how many each step may have."""
    request = placement(0, prompt, **{"max_tokens": 40, "sampling": sampling, **asked})
    (outcome,), steps = serve(engine, [request], lambda _, step: drafts[step], len(drafts))
    return [(step.verified, step.accepted + 1) for step in steps], outcome.tokens


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
    plain = run(cpu_engine(), [0] * 17, sampling=replace(SEEDED, allowed_token_ids=()), prompt=[45, 49, 1])
    checkpoint = RandomCheckpoint(replace(CONFIG, vocab_size=vocab_size), seed=5)
    sampling = replace(SEEDED, allowed_token_ids=())
    told, tokens = run(device_engine(checkpoint), steps, sampling=sampling, prompt=[45, 49, 1])
    assert tokens == plain[1][: len(tokens)]
    assert sum(verified for verified, _ in told) > 0


def test_no_end_token_is_drafted():
    _, tokens = run(cpu_engine(), [0] * 6)
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
