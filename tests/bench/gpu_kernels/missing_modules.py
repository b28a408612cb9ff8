"""A plugin of pytest: tests that import what is not installed are skipped. Knows what may be missing.

Apart, because pytest loads it by its name.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

import pytest

# What tests and CPU implementations use besides torch, Triton, numpy and the kernels themselves.
_OPTIONAL = ("hypothesis", "numba", "llvmlite", "structlog")


class _Missing:
    """Finds no module, and skips whoever looks for one of those that are missing."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Raise pytest's Skipped for a missing module; anything else is for the finders after this one."""
        if name.partition(".")[0] in self._names:
            pytest.skip(f"{name} is not installed here", allow_module_level=True)
        return None


def pytest_configure() -> None:
    """Look once what is there."""
    missing = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    if missing:
        sys.meta_path.insert(0, _Missing(missing))
