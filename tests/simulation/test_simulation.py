"""Whole systems in virtual time: nothing is lost, doubled or changed, whatever goes wrong, and then everything ends."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from paceline_kernels.devices import cpu_stands_for_gpu
from paceline_scheduler.core.planning.speculation import Acceptance
from simulation.ablations import ABLATIONS
from simulation.run import first_failure, run_seed, run_seeds

ROOT = Path(__file__).parents[2]
NUM_SEEDS = 2_000
NUM_SOAK_SEEDS = 200_000
# Tests that others can run beside: the whole run takes several at once. `make test` runs the first two.
SEEDS_PER_TEST = 75
CHUNKS = [
    pytest.param(first, marks=[pytest.mark.slow] if first >= 2 * SEEDS_PER_TEST else [])
    for first in range(0, NUM_SEEDS, SEEDS_PER_TEST)
]


def run_all(seeds, num_processes=1, *, is_on_twins=False):
    """Run seeds, print how fast, and fail with the story of the first that failed."""
    summary = run_seeds(seeds, num_processes, is_on_twins=is_on_twins)
    print(summary)
    if summary.failed:
        outcome, story = run_seed(summary.failed[0].seed, is_on_twins=is_on_twins)
        others = [failed.seed for failed in summary.failed[1:]]
        twin = " --twin" if is_on_twins else ""
        replay = f"PYTHONPATH=tests/support python -m simulation --seed {outcome.seed}{twin} --story"
        pytest.fail(f"{story}\nseed {outcome.seed}: {outcome.failures}\n{replay}\nalso {others}", pytrace=False)


@pytest.mark.parametrize("first", CHUNKS)
def test_whatever_goes_wrong_every_client_gets_exactly_its_output(first):
    run_all(range(first, min(first + SEEDS_PER_TEST, NUM_SEEDS)))


@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        pytest.param(range(6, 24), marks=pytest.mark.slow),
        pytest.param(range(100, 400), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_on_the_twins_of_gpus_every_client_gets_exactly_its_output(seeds):
    run_all(seeds, is_on_twins=True)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_on_the_twins_of_gpus_with_their_kernels_interpreted():
    with np.errstate(all="ignore"), cpu_stands_for_gpu():
        run_all(range(5), is_on_twins=True)


@pytest.mark.soak
def test_the_same_in_a_hundred_times_as_many_ways():
    run_all(range(NUM_SEEDS, NUM_SEEDS + NUM_SOAK_SEEDS), num_processes=len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("is_on_twins", "num_seeds"),
    [(False, 12), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(False, 40), (True, 12)])],
)
def test_drafts_are_among_what_is_tried_right_ones_and_wrong_ones(is_on_twins, num_seeds, monkeypatch):
    observe, seen = Acceptance.observe, Counter()

    def observe_and_count(acceptance, rows, num_verified, num_right):
        seen.update(zip(num_verified.tolist(), num_right.tolist(), strict=True))
        observe(acceptance, rows, num_verified, num_right)

    monkeypatch.setattr(Acceptance, "observe", observe_and_count)
    for seed in range(num_seeds):
        assert not run_seed(seed, is_on_twins=is_on_twins)[0].failures
    assert any(right == verified > 1 for verified, right in seen)
    assert any(0 < right < verified for verified, right in seen)
    assert any(right == 0 < verified for verified, right in seen)


@pytest.mark.parametrize("name", ABLATIONS)
def test_without_a_safeguard_a_run_goes_wrong(name):
    ablation = ABLATIONS[name]
    assert ablation.shown_by is not None
    with ablation.active():
        outcome, _ = run_seed(ablation.shown_by)
    assert outcome.failures, f"nothing goes wrong though not {ablation.safeguard}; see `Ablation.shown_by`"


@pytest.mark.slow
@pytest.mark.parametrize("name", ABLATIONS)
def test_without_a_safeguard_a_run_goes_wrong_soon(name):
    """Each safeguard is missed within 300 seeds, so the checks notice what they are there for."""
    ablation = ABLATIONS[name]
    with ablation.active():
        outcome = first_failure(range(300), ablation.guards_against)
    assert outcome is not None, f"nothing goes wrong though not {ablation.safeguard}"


def test_safeguards_are_back_when_an_ablation_is_over():
    with ABLATIONS["late-tags"].active():
        assert run_seed(0)[0].failures
    assert not run_seed(0)[0].failures


def test_a_seed_is_the_same_run_under_every_hash_seed():
    """Nothing depends on the order of a set, or on anything else outside of the seed (I11)."""
    command = (sys.executable, "-m", "simulation", "--first", "7", "--seeds", "6", "--processes", "1")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    traces = [
        subprocess.run(
            command, env={**environment, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
        ).stdout.split(";")[0]
        for hash_seed in ("0", "1")
    ]
    assert traces[0] == traces[1]
    assert traces[0].startswith("trace ")


def test_a_failed_seed_ends_with_its_story_and_what_replays_it():
    with ABLATIONS["late-tags"].active():
        outcome, story = run_seed(0)
    assert 20 <= len(story.splitlines()) <= 50
    assert outcome.failures[0] in story
