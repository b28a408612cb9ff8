"""Patterns of a closed subset, matched as Python's `re` matches them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_scheduler.api.text.parts.patterns import (
    MAX_MARK_CHARS,
    UNFINISHED,
    Marks,
    Match,
    PatternError,
    letters,
    read_pattern,
)

TAKEN = [
    r"<tool_call>",
    r"<a>\s*<b>",
    r"<f=(?P<name>\w+)>",
    r"<f=(?P<name>.*?)>\n",
    r"\[a\](?P<name>\w+)\[b\](?P<id>\w+)\[c\]",
    r"<(?P<all>\w+-\w+)>\s*",
]


@pytest.mark.parametrize("source", TAKEN)
@given(text=st.text("<>[]abcf_tol=- \n", max_size=30))
def test_a_pattern_is_found_where_python_finds_it(source, text):
    marks, expected = Marks([read_pattern(source)]), re.compile(source, re.DOTALL).search(text)
    start, found, _ = marks.search(text, 0, is_end=True)
    assert (found is None) == (expected is None)
    if expected:
        assert (start, found.end, found.groups) == (*expected.span(), expected.groupdict())


@pytest.mark.parametrize("source", TAKEN)
@given(text=st.text("<>[]abcf_tol=- \n", max_size=30), data=st.data())
def test_what_more_text_may_still_change_is_not_decided(source, text, data):
    pattern = read_pattern(source)
    whole = pattern.match(text, 0, is_end=False)
    begun = pattern.match(text[: data.draw(st.integers(0, len(text)))], 0, is_end=False)
    assert begun is UNFINISHED or begun == whole


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (r"a(?=b)", "'(?=b'"),
        (r"a[bc]", "'[bc]'"),
        (r"a|b", "'|b'"),
        (r"a+", "'+'"),
        (r"a{2}", "'{2}'"),
        (r"ab\d", r"'\\d'"),
        (r"ab$", "'$'"),
        (r"\s*a", "begin with letters"),
        (r"", "begin with letters"),
        (r"a\s* b", r"where \s* ends"),
        (r"a\w+b", r"where \w+ ends"),
        (r"a.*?", "where .*? ends"),
        (r"a.*?\s*b", "where .*? ends"),
        (r"a(?P<x>b", "does not close"),
        (r"a(?P<x>b)(?P<x>c)", "twice"),
        ("a" * (MAX_MARK_CHARS + 1), "characters"),
    ],
)
def test_a_pattern_outside_the_subset_is_refused(source, why):
    with pytest.raises(PatternError, match=re.escape(why)):
        read_pattern(source)


def test_no_mark_is_longer_than_the_bound():
    pattern = read_pattern(r"<f=(?P<name>.*?)>")
    assert isinstance(pattern.match("<f=" + "a" * 500 + ">", 0), Match)
    assert pattern.match("<f=" + "a" * MAX_MARK_CHARS, 0) is None


def test_of_marks_that_begin_together_the_longest_is_meant():
    marks = Marks([letters("<a"), letters("<ab>")])
    assert marks.search("x<ab", 0) == (1, None, None)
    assert marks.search("x<ab>", 0)[1].end == 5
    assert marks.search("x<ac", 0)[1].end == 3
