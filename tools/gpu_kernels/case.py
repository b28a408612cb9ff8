"""What a case is: one operation at one shape, with what it is to be compared with. Knows no operation."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gpu_kernels.anchors import AnchorKey


class Scale(enum.Enum):
    """How large the shapes are."""

    FULL = "full"
    QUICK = "quick"  # those that targets name
    ODD = "odd"  # tiny and uneven, to be checked and not to be timed


class Bound(enum.Enum):
    """What an operation cannot be faster than."""

    MEMORY = "TB/s"
    PRODUCTS = "TFLOP/s"
    LAUNCH = ""  # so little to do that only the time itself says something


class Capture(enum.Enum):
    """How calls get to the device while they are timed."""

    GRAPH = "graph"  # captured once and replayed, so that the host has no part in the time
    STREAM = "stream"  # called one after another, for what takes arguments from host memory


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors are, and the type of activations."""

    device: torch.device
    dtype: torch.dtype
    has_fp8: bool = True

    @property
    def rounding(self) -> float:
        """The relative error that one rounding to the type, and a few before it, may come to: see `error_of`."""
        return 1e-2 if self.dtype == torch.bfloat16 else 2e-3

    def normal(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal numbers. Never zeros: products of zeros take less power, hence less time."""
        generator = torch.Generator(self.device).manual_seed(seed)
        made = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return made if dtype is None else made.to(dtype)

    def integers(self, high: int, *shape: int, seed: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """0 to high - 1."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(high, shape, generator=generator, device=self.device, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Work:
    """An operation with one set of inputs."""

    ours: Callable[[], object]
    theirs: Callable[[], object] | None  # what torch has for it
    error: Callable[[], float]  # of ours against the reference


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one shape."""

    op: str
    shape: Mapping[str, int | str]
    bound: Bound
    num_bytes: int  # the fewest that memory has to move: each input read once, each output written once
    num_flops: int
    build: Callable[[int], Work]  # the work of a seed
    allowed_error: float
    anchor: AnchorKey | None = None
    capture: Capture = Capture.GRAPH

    @property
    def name(self) -> str:
        """Operation and shape."""
        return f"{self.op} {self.shape_name}"

    @property
    def shape_name(self) -> str:
        """The shape, with the names of its numbers."""
        return " ".join(value if isinstance(value, str) else f"{name} {value}" for name, value in self.shape.items())


def error_of(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is expected; NaN if either holds one."""
    expected = expected.double()
    return float(torch.linalg.vector_norm(ours.double() - expected) / torch.linalg.vector_norm(expected))


def mismatch_of(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """How many numbers differ, for what has to be exact."""
    return float(sum(int((ours.cpu() != expected.cpu()).sum()) for ours, expected in pairs))
