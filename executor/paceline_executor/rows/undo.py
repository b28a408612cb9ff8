"""A list of ways back.

Apart from `table`, because the parts that it is made of are taken back too.
"""

from collections.abc import Callable


class Undo:
    """`roll_back` takes changes back, the last first."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def roll_back(self) -> None:
        while self._steps:
            self._steps.pop()()
