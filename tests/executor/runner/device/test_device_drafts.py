"""Drafts on a device: in which sizes steps run, what is looked at, how many there may be, and whose.

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
from drafting.targets import BUCKETS, KINDS, LIMITS, Kind, Place, Target
from executor_rig.plans import GREEDY, placement, plan
from paceline_executor.link.engine import Engine
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.rows.batch import granted_drafts
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.device.draft_model import _CatchUpTime, _shares
from paceline_executor.runner.device.drafts import LookupDrafter
from random_models import TINY_CONFIG, RandomCheckpoint

LONG_LIMITS = replace(LIMITS, max_model_len=48)
CONFIG = replace(TINY_CONFIG, vocab_size=LIMITS.vocab_size)
TARGET = RandomCheckpoint(CONFIG)
SEEDED = replace(GREEDY, temperature=1.0, seed=7, allowed_token_ids=(1, 2, 3))  # so that two models agree often enough


@pytest.fixture(scope="module")
def lookups(tmp_path_factory):
    """A warm device that looks drafts up."""
    return Target(KINDS["captured"], tmp_path_factory.mktemp("head"))


@pytest.fixture
def one_row(lookups, monkeypatch):
    """Serves a row alone whose decodes have so many drafts: its steps, and the sizes that they were launched in."""
    sizes = []
    launch = lookups.runner._steps.launch
    monkeypatch.setattr(
        lookups.runner._steps, "launch", lambda size, *kinds: [sizes.append(size), launch(size, *kinds)][1]
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
    assert granted_drafts(drafts, np.arange(3), LIMITS).tolist() == [5, 5, 5]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paceline_executor.limits.MAX_VERIFIED_TOKENS", 10)
        assert granted_drafts(drafts, np.arange(3), LIMITS).tolist() == [5, 2, 0]
        assert granted_drafts(drafts, np.array([0, 2]), LIMITS).tolist() == [5, 3]
        patched.setattr("paceline_executor.limits.MAX_VERIFIED_TOKENS", 3)
        assert granted_drafts(drafts, np.arange(3), LIMITS) is None


# A draft model


@pytest.fixture(params=["captured", "float32"], ids=["twin", "cpu"])
def drafted_by(request):
    """Makes engines on the twin of a GPU and on a CPU, for which this model drafts."""

    def made(checkpoint, max_model_len=None):
        place = Place(KINDS[request.param], LONG_LIMITS)
        drafting = place.draft_model(checkpoint, FLOAT32_NUMERICS, max_model_len)
        return Engine(RowTable(LONG_LIMITS), place.runner(drafting, TARGET))

    return made


def plain_engine():
    """Nobody drafts."""
    return Engine(RowTable(LONG_LIMITS), Place(Kind(), LONG_LIMITS).runner(None, TARGET))


def run(engine, drafts, *, sampling=SEEDED, prompt=(1, 2, 3), **asked):
    """Drafts verified and tokens brought of each step, and all tokens; drafts: how many each step may have."""
    request = placement(0, prompt, **{"max_tokens": 40, "sampling": sampling, **asked})
    (outcome,), steps = serve(engine, [request], lambda _, step: drafts[step], len(drafts))
    return [(step.verified, step.accepted + 1) for step in steps], outcome.tokens


def test_a_row_is_caught_up_before_it_has_drafts(drafted_by):
    """Behind steps without drafts, and behind a prompt that is longer than a step."""
    engine = drafted_by(TARGET)
    told, _ = run(engine, [0] * 12 + [5, 5])
    assert told[12:] == [(5, 6), (5, 6)]
    assert drafts_behind_a_prompt(engine, 24, preempt=[0]) == [0, 0, 3, 3]


def drafts_behind_a_prompt(engine, num_tokens, spare_ns=10**9, **contents):
    """How many each step of a row verifies: of so many prompt tokens, then of up to three drafts."""
    contents["place"] = [placement(1, ([1, 2] * num_tokens)[:num_tokens], max_tokens=24, sampling=SEEDED)]
    contents["grants"] = [(1, cell, cell) for cell in range(LONG_LIMITS.max_blocks_per_row)]
    for start in range(0, num_tokens, LONG_LIMITS.max_num_batched_tokens):
        chunk = min(num_tokens - start, LONG_LIMITS.max_num_batched_tokens)
        engine.collect(engine.launch(plan([(1, chunk)], **contents)))
        contents = {}
    drafting = replace(plan([(1, 4)], drafts=[3]), draft_spare_ns=spare_ns)
    results = [engine.collect(engine.launch(drafting)) for _ in range(4)]
    assert all(result.num_accepted == 1 + result.num_draft_tokens for result in results)
    return [int(result.num_draft_tokens.sum()) for result in results]


@pytest.mark.parametrize(("spare_ns", "num_drafts"), [(0, [0, 0, 3, 3]), (1, [3, 3, 3, 3]), (10**9, [3, 3, 3, 3])])
@pytest.mark.parametrize("drafted_by", ["float32"], indirect=True)
def test_a_cpu_catches_up_in_the_time_there_is(drafted_by, spare_ns, num_drafts):
    """Its steps wait meanwhile: of thirteen tokens six come with the drafts, and sixteen more once there is any."""
    assert drafts_behind_a_prompt(drafted_by(TARGET), 13, spare_ns) == num_drafts


def test_what_a_token_takes_is_measured():
    """In steps of many: few hardly take longer than one."""
    time = _CatchUpTime()
    assert [time.tokens_within(spare_ns) for spare_ns in (0, 1, 20_000_000)] == [0, 16, 20]
    for num_tokens, took_ns in [(100, 50_000_000)] * 40 + [(3, 90_000_000)] * 40:
        time.observe(num_tokens, took_ns)
    assert time.tokens_within(20_000_000) == pytest.approx(40, abs=1)


def test_no_drafts_where_the_model_does_not_reach(drafted_by):
    """Rows longer than it knows positions for go on by a token; the last one that it computes is drafted behind."""
    told, _ = run(drafted_by(TARGET, max_model_len=8), [0, 3, 3, 3])
    assert told == [(0, 1), (3, 4), (1, 2), (0, 1)]


@pytest.mark.parametrize("vocab_size", [40, 64])
def test_another_vocabulary_costs_drafts_alone(drafted_by, vocab_size):
    """Of ids that only one of the two has none is drafted, or none is right."""
    asked = {"sampling": replace(SEEDED, allowed_token_ids=()), "prompt": [45, 49, 1]}
    _, plain = run(plain_engine(), [0] * 17, **asked)
    checkpoint = RandomCheckpoint(replace(CONFIG, vocab_size=vocab_size), seed=5)
    told, tokens = run(drafted_by(checkpoint), [0, 3, 3, 3, 3], **asked)
    assert tokens == plain[: len(tokens)]
    assert sum(verified for verified, _ in told) > 0


def test_no_end_token_is_drafted(drafted_by):
    _, tokens = run(plain_engine(), [0] * 6)
    end = tokens[5]
    first = tokens.index(end)
    told, ended = run(drafted_by(TARGET), [0, 5] if first else [0], end_token_ids=(end,))
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
