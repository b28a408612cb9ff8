"""Prompt lookup: drafts are what followed the longest earlier match, however the row grew."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_executor.speculation import prompt_lookup
from paceline_executor.speculation.prompt_lookup import PromptLookup
from paceline_executor.testing.drafters import wanted_drafts


def drafts_of(drafter, tokens, num_wanted=4, row=0, min_chance=0.0):
    """What it drafts for a row with these tokens."""
    (drafts,) = drafter.draft(replace(wanted_drafts([(row, tokens, num_wanted)]), min_chance=min_chance))
    return drafts.tolist()


def longest_match(tokens):
    """The reference: how many of the last tokens stood before in this order, and where they ended last."""
    end = len(tokens) - 1
    best = (0, -1)
    for place in range(end):
        length = next((i for i in range(16) if i > place or tokens[place - i] != tokens[end - i]), 16)
        best = max(best, (length, place))
    return best


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # the latest of two
        ([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], [3, 9, 1, 2]),  # the longest
        ([5, 6, 6, 6], [6, 6, 6, 6]),  # goes round
        ([3, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4, 2], []),  # one token is no match
        ([1], []),
    ],
)
def test_drafts_are_what_followed_the_longest_match(tokens, expected):
    assert drafts_of(PromptLookup(), tokens) == expected


@pytest.mark.hypothesis
def test_drafts_do_not_depend_on_how_a_row_grew(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "_MAX_CANDIDATES", 100)  # as many as there can be here
    reached = Counter()

    @settings(max_examples=settings.default.max_examples)
    @given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 8))
    def drafts_follow_the_longest_match(pieces, num_wanted):
        grown, tokens = PromptLookup(), []
        for piece in pieces:
            tokens += piece
            drafts = drafts_of(grown, tokens, num_wanted)
            assert drafts == drafts_of(PromptLookup(), tokens, num_wanted)
            length, place = longest_match(tokens)
            expected = list(tokens)
            for _ in range(num_wanted):
                expected.append(expected[place + 1 + len(expected) - len(tokens)])
            assert drafts == (expected[len(tokens) :] if length >= 2 else [])
            reached[bool(drafts)] += 1

    drafts_follow_the_longest_match()
    assert min(reached.values()) >= 20, reached


def test_a_forgotten_row_begins_anew():
    drafter = PromptLookup()
    assert drafts_of(drafter, [1, 2, 3, 4, 1, 2]) == [3, 4, 1, 2]
    drafter.forget(0)
    assert drafts_of(drafter, [5, 6, 7, 8, 9, 1, 2]) == []


def test_rows_are_looked_up_in_their_own_tokens():
    drafter = PromptLookup()
    assert drafts_of(drafter, [1, 2, 3, 1, 2], row=0) == [3, 1, 2, 3]
    assert drafts_of(drafter, [1, 2, 4, 1, 2], row=1) == [4, 1, 2, 4]
    assert drafts_of(drafter, [1, 2, 3, 1, 2, 3], row=0) == [1, 2, 3, 1]


def test_a_long_prompt_is_indexed_in_several_steps(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "_MAX_INDEXED", 10)
    drafter, tokens = PromptLookup(), [*range(22), 3, 4]
    assert [drafts_of(drafter, tokens) for _ in range(3)] == [[], [], [5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("tokens", "min_chance", "num_drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], 0.0, 4),
        ([1, 2, 3, 4, 5, 6, 1, 2], 0.3, 2),  # 1/2, then 2/3 of that
        ([1, 2, 3, 4, 5, 6, 1, 2], 0.4, 1),
        ([1, 2, 3, 4, 5, 6, 1, 2], 0.6, 0),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 0.6, 2),  # 3/4, then 4/5 of that
        ([*range(20), *range(16)], 0.9, 1),
        ([*range(20), *range(16)], 1.0, 0),
    ],
)
def test_a_draft_that_is_less_likely_than_it_must_be_is_left_out(tokens, min_chance, num_drafts):
    """What follows a long match is right more often, and a later draft only with those before it."""
    assert len(drafts_of(PromptLookup(), tokens, min_chance=min_chance)) == num_drafts


def grown_by(pieces, min_chance):
    """How many drafts each piece of a row brings, looked up behind it."""
    drafter, tokens, counts = PromptLookup(), [], []
    for piece in pieces:
        tokens += piece
        counts.append(len(drafts_of(drafter, tokens, min_chance=min_chance)))
    return counts


def test_a_row_that_copies_gets_drafts_after_short_matches_too():
    """What would have been drafted is compared with what came, though no draft of it was verified."""
    copying = [[1, 2, 3], *([20 + i, 1, 2] if i % 2 else [3] for i in range(12))]
    counts = grown_by(copying, min_chance=0.7)
    assert (counts[2], counts[-1]) == (0, 1)


def test_a_row_that_does_not_copy_stops_drafting_and_another_one_does_not():
    """Each row shows it by itself."""
    drafter, tokens = PromptLookup(), [1, 2]
    for other in range(10, 30):
        tokens += [other, 1, 2]
        drafts_of(drafter, tokens, min_chance=0.3)
    assert drafts_of(drafter, tokens, min_chance=0.3) == []
    assert len(drafts_of(drafter, tokens, row=1, min_chance=0.3)) == 2


def test_what_a_row_showed_long_ago_counts_less():
    new = [token for other in range(100, 120) for token in (other, 1, 2)]
    copying = [[1, 2, *new], *([3, 1, 2] for _ in range(60))]
    counts = grown_by(copying, min_chance=0.7)
    assert counts[0] == 0
    assert counts[-1] == 4
