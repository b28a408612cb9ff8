"""The whole stays within its limits, which rise only where a user gets something for it."""

import re
import tomllib
from pathlib import Path

import pytest

from repository_checks.sources import ROOT, documents, product_sources, sources_of_tests

pytestmark = pytest.mark.lint

LIMITS = tomllib.loads(Path(__file__).with_name("totals.toml").read_text(encoding="utf-8"))


def totals():
    """Lines of hand-written Python, and words of all documents."""
    product, tests = (
        sum(len(source.text.splitlines()) for source in sources) for sources in (product_sources(), sources_of_tests())
    )
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in documents())
    return {"product_lines": product, "product_and_test_lines": product + tests, "markdown_words": words}


def unexplained(limits, decisions):
    """The limits that are not what they were at least, without a line that says why."""
    return [
        name
        for name, each in limits.items()
        if each["limit"] != each["least"]
        and not re.search(rf"^- `{name}` {each['limit']:,}: \w", decisions, flags=re.MULTILINE)
    ]


def test_the_whole_stays_within_its_limits():
    found = totals()
    assert found.keys() == LIMITS.keys()
    assert min(found.values()) > 1000
    assert {name: number for name, number in found.items() if number > LIMITS[name]["limit"]} == {}


def test_a_limit_is_raised_for_what_a_user_gets():
    decisions = (ROOT / "DECISIONS.md").read_text(encoding="utf-8")
    assert unexplained(LIMITS, decisions.partition("\n## Totals\n")[2]) == []


def test_a_raise_that_nobody_explains_is_found():
    limits = {"product_lines": {"limit": 72_000, "least": 71_000}, "markdown_words": {"limit": 500, "least": 500}}
    assert unexplained(limits, "- `product_lines` 72,000: adapters.") == []
    assert unexplained(limits, "- `product_lines` 71,500: adapters.\n- `product_lines` 72,000:\n") == ["product_lines"]
