"""The range of a number: what lies in it, and how sentences name it. Knows no field.

Apart from `values`, so that the scheduler's edge has ranges for fields that no plan has.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` on, or above it where `is_open`, up to `high`. NaN is in no range."""

    low: float
    high: float = math.inf
    is_open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"above {self.low}, up to {self.high}" if self.is_open else f"{self.low} to {self.high}"

    @property
    def outside(self) -> str:
        """Return what a number is that lies elsewhere."""
        return f"outside the range above {self.low} up to {self.high}" if self.is_open else f"outside {self}"
