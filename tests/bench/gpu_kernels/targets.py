"""What is to be reached, as data. Knows figures of results; not how they come about."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_kernels.results import Result

_MIB = 2**20


class Measure(enum.Enum):
    """A figure of a result."""

    ANCHOR = "x of the best anchor"  # its time over ours
    OTHER = "x of the other"  # the same of what it is timed beside
    COPY_SHARE = "of a copy"
    PRODUCT_SHARE = "of a large product"
    TBPS = "TB/s"
    US = "us"  # the one of which less is better


@dataclass(frozen=True, slots=True)
class Target:
    """A figure for every shape of an operation that lies within bounds."""

    op: str
    measure: Measure
    wanted: float
    within: Mapping[str, tuple[float, float] | str] = field(default_factory=dict)
    min_bytes: int = 0

    def applies(self, result: Result) -> bool:
        case = result.case
        if case.op != self.op or case.num_bytes < self.min_bytes:
            return False
        return all(_is_within(case.shape.get(name), bounds) for name, bounds in self.within.items())

    def is_reached(self, result: Result) -> bool | None:
        """None where the figure is not known, as without anchors."""
        return None if self.figure(result) is None else self.margin(result) >= 1

    def figure(self, result: Result) -> float | None:
        figures = {
            Measure.ANCHOR: result.anchor_ratio,
            Measure.OTHER: result.torch_ratio,
            Measure.COPY_SHARE: result.share_of_ceiling,
            Measure.PRODUCT_SHARE: result.share_of_ceiling,
            Measure.TBPS: result.rate,
            Measure.US: result.us,
        }
        return figures[self.measure]

    def margin(self, result: Result) -> float:
        """The figure over what is wanted, the other way round where less is better; infinite where it is not known."""
        figure = self.figure(result)
        if figure is None:
            return math.inf
        return self.wanted / figure if self.measure is Measure.US else figure / self.wanted

    @property
    def bound(self) -> str:
        return f"{'<=' if self.measure is Measure.US else '>='} {self.wanted:g} {self.measure.value}"

    def __str__(self) -> str:
        places = [f"{name} {_text(bounds)}" for name, bounds in self.within.items()]
        places += [f">= {self.min_bytes // _MIB} MiB"] if self.min_bytes else []
        return f"{self.op}{' (' + ', '.join(places) + ')' if places else ''} {self.bound}"


def _text(bounds: tuple[float, float] | str) -> str:
    if isinstance(bounds, str):
        return bounds
    low, high = bounds
    if math.isinf(high):
        return f">= {low:g}"
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _is_within(value: int | str | None, bounds: tuple[float, float] | str) -> bool:
    if isinstance(bounds, str) or not isinstance(value, int):
        return value == bounds
    return bounds[0] <= value <= bounds[1]


_SMALL, _FEW_TOKENS = (1, 16), (1, 32)
# Of weights of 4 bits: at most so much of the time of our product by weights of 16.
_SHARES: tuple[tuple[float, Mapping[str, tuple[float, float] | str]], ...] = (
    (0.38, {"m": (1, 8), "n": (28_672, 28_672)}),
    (0.38, {"m": (1, 8), "k": (14_336, 14_336)}),
    (0.58, {"m": (1, 8), "n": (4096, 6144), "k": (4096, 4096)}),
    (0.45, {"m": (16, 16)}),
    (0.6, {"m": (32, 32)}),
    (0.85, {"m": (64, 64)}),
    (1.05, {"m": (128, 128)}),
    (1.1, {"m": (256, math.inf)}),
)
_GROUPED = tuple(
    Target("grouped linear", Measure.OTHER, round(1 / share, 2), {"weight": weight, **within})
    for weight in ("int4 g128", "int4 g128 zeros")
    for share, within in _SHARES
)
# Of several that apply to one result all count.
TARGETS = (
    Target("decode attention", Measure.ANCHOR, 1.0, {"b": (8, math.inf), "ctx": (2048, math.inf)}),
    Target("decode attention", Measure.TBPS, 3.6, {"kv": "fp8"}, min_bytes=256 * _MIB),
    Target("prefill attention", Measure.ANCHOR, 0.8, {"kv": "bfloat16"}),
    Target("scaled linear", Measure.ANCHOR, 1.5, {"m": _SMALL, "n": (4096, 6144), "k": (4096, 4096), "weight": "fp8"}),
    Target("scaled linear", Measure.ANCHOR, 1.0, {"m": _SMALL, "weight": "fp8"}),
    Target("add + norm", Measure.COPY_SHARE, 0.85, {"tokens": (4096, 4096)}),
    Target("rope + kv", Measure.COPY_SHARE, 0.85, {"tokens": (4096, 4096)}),
    Target("silu", Measure.COPY_SHARE, 0.85, {"tokens": (4096, 4096)}),
    Target("sample", Measure.US, 60, {"rows": (256, 256)}),
    Target("experts", Measure.COPY_SHARE, 0.85, {"t": _FEW_TOKENS}),
    Target("experts", Measure.PRODUCT_SHARE, 0.55, {"t": (2048, 2048), "weight": "bfloat16"}),
    *_GROUPED,
    Target("grouped linear", Measure.OTHER, round(1 / 1.08, 2), {"m": (1, 64), "weight": "fp8 g128"}),
    Target("grouped linear", Measure.OTHER, round(1 / 1.2, 2), {"m": (2048, 2048), "weight": "fp8 g128"}),
)
