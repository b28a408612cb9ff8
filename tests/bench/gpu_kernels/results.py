"""What was measured of a case, and the figures that follow from it. Knows arithmetic only."""

from dataclasses import dataclass

from gpu_kernels.anchors import Anchor
from gpu_kernels.case import Bound, Case


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What memory and matrix units reach on this device in this run."""

    copy_tbps: float  # bytes read and written
    product_tflops: float
    fp8_tflops: float | None = None  # of products of float8, where they are known


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one call."""

    us: float  # median
    spread: float  # of the middle half of the repetitions, over the median


@dataclass(frozen=True, slots=True)
class Result:
    """A case that was checked and timed."""

    case: Case
    timing: Timing
    theirs: Timing | None
    anchor: Anchor | None
    ceilings: Ceilings
    torch_failure: str = ""  # why there is no time of torch where there should be one

    @property
    def us(self) -> float:
        return self.timing.us

    @property
    def rate(self) -> float:
        """In TB/s or TFLOP/s, by what bounds the operation."""
        amount = self.case.num_bytes if self.case.bound is Bound.MEMORY else self.case.num_flops
        return amount / self.us / 1e6

    @property
    def share_of_ceiling(self) -> float | None:
        """The rate over that of a copy or of a large product."""
        ceiling = {
            Bound.MEMORY: self.ceilings.copy_tbps,
            Bound.PRODUCTS: self.ceilings.product_tflops,
            Bound.FP8_PRODUCTS: self.ceilings.fp8_tflops,
        }[self.case.bound]
        return None if ceiling is None else self.rate / ceiling

    @property
    def torch_ratio(self) -> float | None:
        return None if self.theirs is None else self.theirs.us / self.us

    @property
    def anchor_ratio(self) -> float | None:
        return None if self.anchor is None else self.anchor.us / self.us


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that could not be built, was wrong, or could not be timed."""

    case: Case
    sentence: str
