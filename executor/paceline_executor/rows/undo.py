"""A list of ways back. Knows callables only.

Apart from `table`, because the parts that it is made of are taken back too.
"""

from collections.abc import Callable


class Undo:
    """Collects, while a plan is applied, how to take each change back; `roll_back` does so, last change first."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def roll_back(self) -> None:
        while self._steps:
            self._steps.pop()()
