"""How often the concepts of the plan protocol are declared."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from repository_checks.sources import Source, product_sources

pytestmark = pytest.mark.lint

MAX_DECLARATIONS = 34
VALUES = Path("protos/paceline/plan/values.py")
SPEAKERS = {"paceline", "paceline_scheduler", "paceline_executor"}


def test_both_processes_take_the_concepts_of_the_plan_protocol_from_one_file():
    sources = [source for source in product_sources() if source.package in SPEAKERS]
    concepts = declared(next(source for source in sources if source.path == VALUES))
    assert {"BatchPlan", "StepResult", "Welcome", "KvGeometry"} <= concepts
    assert len(concepts) <= MAX_DECLARATIONS
    assert list(declared_again(sources, concepts)) == []


def test_a_second_declaration_is_found():
    path = Path("executor/paceline_executor/runner/interface.py")
    assert list(declared_again([Source(path, "class Welcome:\n    pass\n")], {"Welcome"})) == [(path, "Welcome")]


def declared(source: Source) -> set[str]:
    return set(re.findall(r"^ *class (\w+)", source.text, flags=re.MULTILINE))


def declared_again(sources: list[Source], concepts: set[str]) -> Iterator[tuple[Path, str]]:
    for source in sources:
        if source.path != VALUES:
            yield from ((source.path, name) for name in sorted(concepts & declared(source)))
