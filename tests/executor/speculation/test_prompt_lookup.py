"""Prompt lookup: drafts are what followed the longest earlier match, however the row grew."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_executor.speculation import prompt_lookup
from paceline_executor.speculation.prompt_lookup import PromptLookup
from paceline_executor.testing.drafters import wanted_drafts


def drafts_of(drafter, tokens, num_wanted=4, row=0):
    """What it drafts for a row with these tokens."""
    (drafts,) = drafter.draft(wanted_drafts([(row, tokens, num_wanted)]))
    return drafts.tolist()


def longest_match(tokens):
    """The reference: how many of the last tokens stood before in this order, and where they ended last."""
    end = len(tokens) - 1
    best = (0, -1)
    for place in range(end):
        length = next((i for i in range(8) if i > place or tokens[place - i] != tokens[end - i]), 8)
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
    """And of several as long, the latest."""
    assert drafts_of(PromptLookup(), tokens) == expected


@pytest.mark.hypothesis
def test_drafts_do_not_depend_on_how_a_row_grew(monkeypatch):
    """They follow the match that a search of all tokens finds, and are those of a row seen for the first time."""
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
    """The next request on it is not drafted for from the tokens of the one before."""
    drafter = PromptLookup()
    assert drafts_of(drafter, [1, 2, 3, 4, 1, 2]) == [3, 4, 1, 2]
    drafter.forget(0)
    assert drafts_of(drafter, [5, 6, 7, 8, 9, 1, 2]) == []


def test_rows_are_looked_up_in_their_own_tokens():
    """However alike they begin."""
    drafter = PromptLookup()
    assert drafts_of(drafter, [1, 2, 3, 1, 2], row=0) == [3, 1, 2, 3]
    assert drafts_of(drafter, [1, 2, 4, 1, 2], row=1) == [4, 1, 2, 4]
    assert drafts_of(drafter, [1, 2, 3, 1, 2, 3], row=0) == [1, 2, 3, 1]


def test_a_long_prompt_is_indexed_in_several_steps(monkeypatch):
    """No step waits for all of it; until then there are no drafts."""
    monkeypatch.setattr(prompt_lookup, "_MAX_INDEXED", 10)
    drafter, tokens = PromptLookup(), [*range(22), 3, 4]
    assert [drafts_of(drafter, tokens) for _ in range(3)] == [[], [], [5, 6, 7, 8]]
