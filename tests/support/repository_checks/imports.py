"""Which module of ours imports which when it is imported: what functions and type checkers import does not count.

Apart from `sources`, which says what is ours.
"""

import ast
from collections.abc import Iterable, Iterator

from repository_checks.sources import Source

_ROOTS = ("protos", "scheduler", "executor", "kernels", "clients")


def import_graph(sources: Iterable[Source]) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    modules = {name_of(source): source.tree for source in sources}
    return {name: set(_imported(tree, modules.keys())) - {name} for name, tree in modules.items()}


def name_of(source: Source) -> str:
    """Return how a module is imported."""
    parts = source.path.with_suffix("").parts
    parts = parts[1:] if parts[0] in _ROOTS else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.Module, modules: Iterable[str]) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.Import(names):
                yield from (each.name for each in names if each.name in modules)
            case ast.ImportFrom(module=str(module), names=names):
                for each in names:
                    found = f"{module}.{each.name}"
                    yield from (name for name in (found if found in modules else module,) if name in modules)
