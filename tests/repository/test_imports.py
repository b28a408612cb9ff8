"""No module of ours comes back to itself by its imports."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from repository_checks.imports import import_graph
from repository_checks.sources import parse, product_sources

pytestmark = pytest.mark.lint


def test_imports_have_no_circles():
    """A circle would tie its modules into one."""
    graph = import_graph(product_sources())
    assert len(graph) > 400
    assert sum(map(len, graph.values())) > 1500
    TopologicalSorter(graph).prepare()


def test_a_circle_is_found():
    texts = {"a": "from paceline_cli import b\n", "b": "import paceline_cli.c\n", "c": "from paceline_cli.a import x\n"}
    paths = {name: Path(f"clients/paceline_cli/{name}.py") for name in texts}
    with pytest.raises(CycleError):
        TopologicalSorter(import_graph(parse(paths[name], text) for name, text in texts.items())).prepare()
    texts["c"] = "def f():\n    from paceline_cli.a import x\n"
    TopologicalSorter(import_graph(parse(paths[name], text) for name, text in texts.items())).prepare()
