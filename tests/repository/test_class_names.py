"""A class's name says one thing: modules of the product share it only where both mean the same across a border."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from repository_checks.sources import Source, product_sources

pytestmark = pytest.mark.lint

# By what is on both sides. The table may get shorter; a new class gets a name of its own.
SHARED = {
    "what a program is told at its start": {"Config"},
    "a value of the protocol, and what clients or their tests make of it": {
        *("Drain", "Estimate", "Explanation", "FinishReason", "Model", "RequestState", "TokenLogprobs", "Tokens"),
    },
    "an error, where it is raised and where it arrives": {
        *("InvalidRequestError", "NoTokenLeftError", "SlowConsumerError", "StepFailedError", "TermSupersededError"),
        "UnsupportedError",
    },
}


def shared_names(sources):
    """Those of classes that several modules define."""
    modules = defaultdict(set)
    for source in sources:
        for node in source.nodes(ast.ClassDef):
            modules[node.name].add(source.path)
    return {name for name, paths in modules.items() if len(paths) > 1}


def test_classes_of_two_modules_share_a_name_only_for_one_thing():
    assert shared_names(product_sources()) == set().union(*SHARED.values())


def test_a_name_of_two_modules_is_found_wherever_they_define_it():
    nested = "def f():\n    class Ledger: ...\n    class Row: ...\n    class Row: ..."
    assert shared_names([Source(Path("a.py"), "class Ledger: ..."), Source(Path("b.py"), nested)]) == {"Ledger"}
