"""Exhaustive choices for straight code, in the manner of TigerBeetle's exhaustigen.

Code asks for one choice after another, as if each were drawn; it is run again until all combinations were tried. What
it asks may depend on what it was answered before.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Gen:
    """The choices of one run after another."""

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []  # what was answered, and the most that can be
        self._num_asked = 0

    def runs(self) -> Iterator[int]:
        """Number the runs; the code is to be run once for each."""
        for number in range(2**63):
            self._num_asked = 0
            yield number
            assert self._num_asked == len(self._path), (
                "the code asked for less than it did before: it is not repeatable"
            )
            while self._path and self._path[-1][0] == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return
            value, most = self._path[-1]
            self._path[-1] = value + 1, most

    def int_inclusive(self, most: int) -> int:
        """Return a number from 0 to `most`."""
        if self._num_asked == len(self._path):
            self._path.append((0, most))
        value, before = self._path[self._num_asked]
        assert before == most, "the code asked for something else than before: it is not repeatable"
        self._num_asked += 1
        return value

    def choice(self, options: Sequence[T]) -> T:
        return options[self.int_inclusive(len(options) - 1)]


class DrawnGen(Gen):
    """The same choices drawn, where there are too many to try all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)  # noqa: S311 - nothing secret

    def int_inclusive(self, most: int) -> int:
        """Return a number from 0 to `most`, half of the time 0."""
        return self._random.randint(0, most) if self._random.random() < 0.5 else 0
