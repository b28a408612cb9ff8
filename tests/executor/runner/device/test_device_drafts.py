"""Drafts on a device, on its twin: in which sizes steps run, what is looked at, how many there may be, and whose.

A draft model first computes what it lacks, and drafts no further than it reaches. That drafts change no token is shown
in `speculation/test_drafts_change_no_token.py`.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafting.serving import serve
from drafting.targets import BUCKETS, DEVICE_LIMITS, DeviceTarget, device_draft_model, device_runner
from paceline_executor.link.engine import Engine
from paceline_executor.rows.batch import granted_drafts
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.runner.device.draft_model import _shares
from paceline_executor.runner.device.drafts import LookupDrafter
from paceline_executor.testing.models import TINY_CONFIG, RandomCheckpoint
from paceline_executor.testing.plans import GREEDY, placement, plan

LIMITS = replace(DEVICE_LIMITS, max_model_len=48)
CONFIG = replace(TINY_CONFIG, vocab_size=LIMITS.vocab_size)
TARGET = RandomCheckpoint(CONFIG)
SEEDED = replace(GREEDY, temperature=1.0, seed=7, allowed_token_ids=(1, 2, 3))  # so that two models agree often enough


@pytest.fixture(scope="module")
def lookups(tmp_path_factory):
    """A warm device that looks drafts up."""
    return DeviceTarget(BUCKETS, tmp_path_factory.mktemp("head"))


@pytest.fixture
def one_row(lookups, monkeypatch):
    """Serves a row alone whose decodes have so many drafts: its steps, and the sizes that they were launched in."""
    sizes = []
    launch = lookups.runner._steps.launch
    monkeypatch.setattr(
        lookups.runner._steps, "launch", lambda size, **kinds: [sizes.append(size), launch(size, **kinds)][1]
    )

    def served(num_drafts, prompt, **asked):
        sizes.clear()
        requests = [placement(0, prompt, **asked)]
        _, steps = serve(lookups.engine("lookup"), requests, lambda _, step: num_drafts if step else 0)
        return steps, list(sizes)

    return served


def test_a_step_that_verifies_is_replayed_in_its_size(one_row):
    sampling = replace(GREEDY, allowed_token_ids=(1,))  # whose lookups are all right
    for num_drafts, longest, num_tokens in ((1, 4, 2), (2, 4, 4), (3, 4, 4), (5, 6, 6)):
        steps, sizes = one_row(num_drafts, [1, 1, 1], max_tokens=2 + num_drafts, sampling=sampling)
        assert [step.accepted for step in steps] == [0, num_drafts]
        assert (sizes[1].num_rows, sizes[1].num_tokens, sizes[1].max_query_len) == (1, num_tokens, longest)
        assert sizes[1] in list(BUCKETS)


def test_nobody_looks_for_drafts_in_a_step_that_has_none(one_row, monkeypatch):
    looked = []
    monkeypatch.setattr(LookupDrafter, "draft", lambda *_: looked.append(True))
    for num_drafts, times in ((0, 0), (2, 1)):
        looked.clear()
        steps, sizes = one_row(num_drafts, [1] * 8, max_tokens=2)
        assert (len(steps), sizes[0].max_query_len, len(looked)) == (2, None, 0)
        steps, _ = one_row(num_drafts, [1] * 8, max_tokens=4)
        assert len(looked) == times * (len(steps) - 2)


def test_lookups_know_tokens_that_were_computed_for_another_row(lookups):
    """What follows 1 2 in the cached part of the prompt is drafted; the device was never given it to compute."""
    engine = lookups.engine("lookup")
    cells, known = [(0, cell, cell) for cell in range(6)], [1, 2, 9, 9, 9, 9, 9, 9, 9, 1]
    placed = placement(0, known, output=[2], num_cached_tokens=8, max_tokens=9)
    result = engine.collect(engine.launch(plan([(0, 3 + 4)], drafts=[4], place=[placed], grants=cells)))
    assert result.num_draft_tokens.tolist() == [4]
    assert lookups.runner._rows.state.token_ids[0, 11:13].tolist()[1:] == [9]


def test_no_more_is_drafted_than_a_step_may_draw():
    drafts = plan([(row, 6) for row in range(3)], drafts=[5, 5, 5])
    assert granted_drafts(drafts, np.arange(3), DEVICE_LIMITS).tolist() == [5, 5, 5]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paceline_executor.limits.MAX_VERIFIED_TOKENS", 10)
        assert granted_drafts(drafts, np.arange(3), DEVICE_LIMITS).tolist() == [5, 2, 0]
        assert granted_drafts(drafts, np.array([0, 2]), DEVICE_LIMITS).tolist() == [5, 3]
        patched.setattr("paceline_executor.limits.MAX_VERIFIED_TOKENS", 3)
        assert granted_drafts(drafts, np.arange(3), DEVICE_LIMITS) is None


# A draft model


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
    asked = {"sampling": replace(SEEDED, allowed_token_ids=()), "prompt": [45, 49, 1]}
    _, plain = run(cpu_engine(), [0] * 17, **asked)
    checkpoint = RandomCheckpoint(replace(CONFIG, vocab_size=vocab_size), seed=5)
    told, tokens = run(device_engine(checkpoint), [0, 3, 3, 3, 3], **asked)
    assert tokens == plain[: len(tokens)]
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
