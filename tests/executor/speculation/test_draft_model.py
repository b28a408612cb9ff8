"""A draft model: all rows of a step together, from what its own cache holds, no faster than its budget allows."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from paceline_executor.runner.row_rules import RowRules
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_executor.speculation.draft_model import CatchUpTime, DraftModel
from paceline_executor.testing.drafters import UpTo, wanted_drafts
from paceline_executor.testing.hash_runner import continuation
from paceline_executor.testing.plans import int32

VOCAB_SIZE, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 1000, 4, 64, 64


class Recording(SimulatedRunner):
    """Remembers the batches it computed."""

    def __init__(self):
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
        self.batches = []

    def compute(self, batch):
        """See HostRunner."""
        self.batches.append(batch)
        return super().compute(batch)


class Rows:
    """Rows with blocks of their own, and a drafter that they ask."""

    def __init__(self, max_catch_up=1000, max_model_len=MAX_LEN):
        self.runner = Recording()
        self.drafter = DraftModel(
            self.runner, max_model_len=max_model_len, vocab_size=VOCAB_SIZE, catch_up=UpTo(max_catch_up)
        )

    def draft(self, *rows):
        """The drafts of rows, (number, tokens, how many), each in blocks of its own; and the batches they took."""
        self.runner.batches.clear()
        size = MAX_LEN // BLOCK_SIZE
        tables = [range(row * size, (row + 1) * size) for row, _, _ in rows]
        drafts = self.drafter.draft(wanted_drafts(rows, tables))
        return [of_row.tolist() for of_row in drafts]

    @property
    def num_tokens(self):
        """Of each batch."""
        return [batch.token_ids.size for batch in self.runner.batches]


def prompt_of(seed, num_tokens):
    return Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)  # noqa: S311  # reproducible on purpose


def test_all_rows_of_a_step_are_computed_together():
    """A pass for every draft of the row with the most, and no row is in it for longer than it wants."""
    rows, prompts = Rows(), [prompt_of(row, 5 + row) for row in range(3)]
    drafts = rows.draft(*((row, prompts[row], num) for row, num in enumerate((3, 1, 2))))
    assert drafts == [continuation(prompts[row], num, VOCAB_SIZE) for row, num in enumerate((3, 1, 2))]
    assert rows.num_tokens == [5 + 6 + 7, 2, 1]


def test_what_was_accepted_is_not_computed_again():
    rows, prompt = Rows(), prompt_of(1, 9)
    drafts = rows.draft((0, prompt, 3))[0]
    for known, num_new in (([*drafts[:1], 7], 1), ([*drafts, 7], 2), ([], 1)):
        assert rows.draft((0, prompt + known, 1)) == [continuation(prompt + known, 1, VOCAB_SIZE)]
        assert rows.num_tokens == [num_new]
        rows.draft((0, prompt, 3))  # as it was


def test_rows_catch_up_within_a_budget_the_nearest_first():
    rows, prompts = Rows(max_catch_up=10), [prompt_of(0, 40), prompt_of(1, 3), prompt_of(2, 25)]
    drafting = []
    for _ in range(9):
        drafts = rows.draft(*((row, prompt, 2) for row, prompt in enumerate(prompts)))
        assert rows.num_tokens[0] <= 10 + 3
        drafting.append("".join(str(row) for row in range(3) if drafts[row]))
        assert all(
            not of_row or of_row == continuation(prompt, 2, VOCAB_SIZE)
            for of_row, prompt in zip(drafts, prompts, strict=True)
        )
    assert drafting == ["1", "1", "12", "12", "12", "12", "012", "012", "012"]


@pytest.mark.parametrize(("num_tokens", "expected"), [(14, 3), (15, 2), (16, 1), (17, 0), (30, 0)])
def test_a_row_is_drafted_for_as_far_as_the_model_reaches(num_tokens, expected):
    rows, prompt = Rows(max_model_len=16), prompt_of(3, num_tokens)
    assert rows.draft((0, prompt, 3)) == [continuation(prompt, expected, VOCAB_SIZE)]


def test_a_row_with_a_token_that_the_model_does_not_know_gets_no_drafts():
    rows = Rows()
    assert rows.draft((0, [5, VOCAB_SIZE, 6], 2), (1, [5, 6], 2)) == [[], continuation([5, 6], 2, VOCAB_SIZE)]


def test_a_row_for_which_nothing_can_be_drawn_has_the_drafts_before():
    rows, prompt = Rows(), [5, 6, 7]
    first = continuation(prompt, 1, VOCAB_SIZE)[0]
    nothing = np.zeros(0, dtype=np.int32)
    rules = RowRules(
        allowed=int32([first]),
        biased=nothing,
        biases=nothing.astype(np.float32),
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        forbidden=nothing,
        bad_words={(first,): int32([first])},  # once it was drawn, it may not follow
        bad_word_lens=(1,),
        min_tokens=0,
        end_token_ids=nothing,
        prompt=nothing,
    )
    wanted = wanted_drafts([(0, prompt, 4), (1, prompt, 4)], [range(8), range(8, 16)])
    wanted = replace(wanted, rows=[replace(wanted.rows[0], rules=rules), wanted.rows[1]])
    assert [of_row.tolist() for of_row in rows.drafter.draft(wanted)] == [
        [first],
        continuation(prompt, 4, VOCAB_SIZE),
    ]


def test_the_budget_is_what_fits_into_the_steps_spare_time():
    """A token takes what the longest step of the warm-up took more for each, and then what is measured; some are
    always computed, as they hardly take longer than one; without time to spare none is. A scheduler that says it has
    years gets no more than a step's tokens.
    """
    time = CatchUpTime([(1, 5_000_000), (256, 56_000_000)], 2048)
    assert [time.tokens_within(spare_ns) for spare_ns in (0, 1, 20_000_000, 2**60)] == [0, 16, 100, 2048]
    for _ in range(40):
        time.observe(0, 10_000_000)
        time.observe(100, 50_000_000)
    assert time.tokens_within(20_000_000) == pytest.approx(50, abs=1)
    for _ in range(40):
        time.observe(3, 90_000_000)  # too few to tell
    assert time.tokens_within(20_000_000) == pytest.approx(50, abs=1)


def test_what_catching_up_takes_is_measured():
    rows, now_ns = Rows(), iter(range(0, 10**9, 1000))
    rows.drafter._clock_ns = lambda: next(now_ns)
    seen = []
    rows.drafter._catch_up.observe = lambda *observed: seen.append(observed)
    rows.draft((0, prompt_of(0, 40), 3), (1, prompt_of(1, 3), 1))
    assert seen == [(39 + 2, 1000), (0, 1000), (0, 1000)]
