"""Drafts on a device, on its twin: in which sizes steps run, what is looked at, and how many there may be.

That they change no token is shown in `speculation/test_drafts_change_no_token.py`.
"""

from dataclasses import replace

import numpy as np
import pytest

from drafting.serving import serve
from drafting.targets import BUCKETS, DEVICE_LIMITS, DeviceTarget
from paceline_executor.rows.drafts import granted_drafts
from paceline_executor.runner.device.drafts import LookupDrafter
from paceline_executor.testing.plans import GREEDY, placement, plan


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
