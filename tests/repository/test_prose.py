"""Prose stays short: no package has more words for every 100 lines than it was cut down to."""

from pathlib import Path

import pytest

from repository_checks.prose import MAX_WORDS, count_words, too_wordy
from repository_checks.sources import parse, product_sources

pytestmark = pytest.mark.lint

QUEUE = Path("scheduler/paceline_scheduler/queue.py")


def test_no_package_has_more_prose_than_its_bound():
    assert too_wordy(product_sources(), MAX_WORDS) == []


def test_a_package_above_its_bound_is_named():
    """Five words in two lines are 250 in 100."""
    source = parse(QUEUE, '"""Three short words."""\nx = 1  # and two\n')
    assert too_wordy([source], {"paceline_scheduler": 250}) == []
    (sentence,) = too_wordy([source], {"paceline_scheduler": 249})
    assert sentence.startswith("paceline_scheduler has 250 words of prose for every 100 lines, the limit is 249")


def test_a_package_without_a_bound_is_named():
    assert len(too_wordy([parse(QUEUE, "# what for\n")], {})) == 1


@pytest.mark.parametrize(
    ("text", "num_words"),
    [
        ('"""Of a module."""', 3),
        ('class A:\n    """Of a class."""\n    def f(self):\n        """Of one."""', 5),
        ('x = 1\n"""Of an attribute."""', 3),
        ("x = 1  # of a line\n# and of none", 6),
        ('x = "no prose # here"\nraise ValueError("nor here")', 0),
    ],
)
def test_docstrings_and_comments_are_counted_and_other_texts_are_not(text, num_words):
    assert count_words(parse(QUEUE, text)) == num_words
