"""Which files are ours to check, as they lie on disk, whether git knows them yet or not."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast

Node = TypeVar("Node", bound=ast.AST)

ROOT = Path(__file__).resolve().parents[3]
PROTOS = ROOT / "protos"
PACKAGES = (
    PROTOS / "paceline",  # but what is generated
    ROOT / "scheduler" / "paceline_scheduler",
    ROOT / "executor" / "paceline_executor",
    ROOT / "kernels" / "paceline_kernels",
    ROOT / "clients" / "paceline_client",
    ROOT / "clients" / "paceline_cli",
    ROOT / "clients" / "paceline_gateway",
)
GENERATED_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


@dataclass(frozen=True)
class Source:
    """One Python file. `path`, relative to the repository, decides which rules look at it."""

    path: Path
    text: str

    def nodes(self, kind: type[Node]) -> list[Node]:
        """Those of its syntax tree that are exactly of this kind."""
        return cast("list[Node]", self._nodes_by_kind[kind])

    @cached_property
    def _nodes_by_kind(self) -> dict[type[ast.AST], list[ast.AST]]:
        nodes = defaultdict[type[ast.AST], list[ast.AST]](list)
        for node in ast.walk(ast.parse(self.text, filename=str(self.path))):
            nodes[type(node)].append(node)
        return nodes

    @property
    def package(self) -> str:
        """The import package the file belongs to, empty for tests."""
        return next((part for part in self.path.parts if part == "paceline" or part.startswith("paceline_")), "")


@dataclass(frozen=True, slots=True)
class Violation:
    """One place that breaks a rule, printed the way editors understand it."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def product_sources() -> Iterator[Source]:
    for package in PACKAGES:
        yield from _sources_under(package)


def sources_of_tests() -> Iterator[Source]:
    yield from _sources_under(ROOT / "tests")


def documents() -> list[Path]:
    return sorted(path for depth in range(4) for path in ROOT.glob("[!.]*/" * depth + "*.md"))


def _sources_under(folder: Path) -> Iterator[Source]:
    for path in sorted(folder.rglob("*.py")):
        if not path.name.endswith(GENERATED_SUFFIXES):
            yield Source(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
