"""Answers served again by the real core and rows, in the time that steps of the default model took."""

import numpy as np
import pytest

from both_sides.playback import Answer, Costs, play
from executor_rig.plans import int32
from paceline_executor.runner.drafter import PromptLookup

MEASURED = Costs(
    (1, 4, 32),
    (0, 1, 2, 4, 8),
    np.array([[5.9, 6.3, 6.4, 7.6, 9.3], [7.3, 8.5, 10.7, 15.4, 23.7], [27.5, 44.8, 65.1, 99.5, 170.5]]),
)
"""Milliseconds, on 2 cores of an AMD EPYC."""


def make_answers(number, num_changed):
    """Answers that repeat a prompt with so many tokens changed, and end with one that comes nowhere else."""
    random = np.random.default_rng(7)
    answers = []
    for _ in range(number):
        prompt = random.integers(1000, 40000, 100)
        output = prompt.copy()
        changed = random.choice(100, num_changed, replace=False)
        output[changed] = random.integers(41000, 48000, num_changed)
        answers.append(Answer(int32([*prompt.tolist(), *output.tolist(), 5]), 100))
    return answers


def found_by_prompt_lookup(answer, num_wanted):
    """How many drafts it finds and how many are right, told all tokens before each step."""
    drafter, size, num_found, num_right = PromptLookup(), answer.start + 1, 0, 0
    while size < answer.token_ids.size:
        drafts = drafter.draft(answer.token_ids[:size], num_wanted, 0.0)
        came = answer.token_ids[size : size + drafts.size]
        right = int(np.cumprod(drafts[: came.size] == came).sum())
        num_found, num_right, size = num_found + drafts.size, num_right + right, size + right + 1
    return num_found, num_right


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_drafts_are_those_that_the_executor_finds(num_drafts):
    (answer,) = make_answers(1, 12)
    played = play([answer], 1, MEASURED, num_drafts)
    assert (played.num_verified, played.num_right) == found_by_prompt_lookup(answer, num_drafts)
    assert played.num_tokens == answer.num_tokens


@pytest.mark.parametrize(
    ("num_rows", "num_changed"),
    [(4, 30), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 6), (4, 6), (1, 30), (1, 90), (4, 90)])],
)
def test_what_is_chosen_is_within_a_twentieth_of_the_best_fixed_number(num_rows, num_changed):
    answers = make_answers(2 * num_rows, num_changed)
    chosen = play(answers, num_rows, MEASURED, None)
    best = max(play(answers, num_rows, MEASURED, number).tokens_per_ms for number in (0, 1, 2, 4, 8))
    assert chosen.tokens_per_ms >= 0.95 * best
