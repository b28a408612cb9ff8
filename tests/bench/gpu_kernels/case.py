"""What a case is: one operation at one shape, with what it is to be compared with. Knows no operation."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from gpu_kernels.anchors import AnchorKey

_Made = TypeVar("_Made")


class Scale(enum.Enum):
    """How large the shapes are."""

    FULL = "full"
    QUICK = "quick"  # those that targets name
    ODD = "odd"  # tiny and uneven, to be checked and not to be timed


class Bound(enum.Enum):
    """What an operation cannot be faster than."""

    MEMORY = "TB/s"
    PRODUCTS = "TFLOP/s"
    FP8_PRODUCTS = "fp8 TFLOP/s"

    @property
    def unit(self) -> str:
        return self.value.removeprefix("fp8 ")


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors are, and the type of activations. On torch's device `meta` they have no numbers."""

    device: torch.device
    dtype: torch.dtype
    has_fp8: bool = True

    @property
    def rounding(self) -> float:
        """The relative error that one rounding to the type, and a few before it, may come to: see `error_of`."""
        return 1e-2 if self.dtype == torch.bfloat16 else 2e-3

    def normal(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal numbers. Never zeros: products of zeros take less power, hence less time."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        made = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        return made if dtype is None else made.to(dtype)

    def integers(self, high: int, *shape: int, seed: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """0 to high - 1."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(high, shape, generator=generator, device=self.device, dtype=dtype)


class Way(Protocol):
    """How a call gets to the device, whose result is to be compared: at once, or out of a graph that is replayed."""

    def __call__(self, call: Callable[[], _Made], /) -> _Made:
        """What the call returns, when it has been done."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """An operation with one set of inputs."""

    ours: Callable[[], object]
    theirs: Callable[[], object] | None  # what torch has for it
    error: Callable[[Way], float]  # of ours against the reference


def compared(
    ours: Callable[[], torch.Tensor],
    expected: Callable[[], torch.Tensor],
    theirs: Callable[[], object] | None = None,
    by: Callable[[torch.Tensor, torch.Tensor], float] | None = None,
) -> Work:
    """Work whose result is a tensor. by: `error_of`, if nothing else."""
    return Work(ours, theirs, lambda way: (by or error_of)(way(ours), expected()))


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one shape."""

    op: str
    shape: Mapping[str, int | str]
    build: Callable[[int], Work]  # the work of a seed
    bound: Bound = Bound.MEMORY
    num_bytes: int = 0  # the fewest that memory has to move: each input read once, each output written once
    num_flops: int = 0
    allowed_error: float = 0.0
    anchor: AnchorKey | None = None
    predicted: str = ""  # printed beside what is found

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape_name}"

    @property
    def shape_name(self) -> str:
        """The shape, with the names of its numbers."""
        return " ".join(value if isinstance(value, str) else f"{name} {value}" for name, value in self.shape.items())


def type_name(dtype: torch.dtype) -> str:
    return "fp8" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")


def at_once(call: Callable[[], _Made], /) -> _Made:
    return call()


def moved(value: Any, device: torch.device) -> Any:  # noqa: ANN401  # columns of any kind, or a number
    """A copy of columns on a device, nested ones too; a number as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return type(value)(*(moved(getattr(value, field.name), device) for field in dataclasses.fields(value)))


def error_of(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is expected; NaN if either holds one."""
    expected = expected.double()
    return float(torch.linalg.vector_norm(ours.double() - expected) / torch.linalg.vector_norm(expected))


def stored_numbers(cache: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor | slice) -> torch.Tensor:
    """What some blocks of a cache stand for. Scales: of float8 one per head, of int8 one per slot."""
    bits = cache.view(torch.uint8) if cache.itemsize == 1 else cache  # not every type of one byte can be indexed
    stored = bits[blocks].view(cache.dtype).float()
    if scales is None:
        return stored
    return stored * (scales[blocks][..., None] if scales.ndim == 3 else scales[:, None, None])


def mismatch_of(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """How many numbers differ, for what has to be exact."""
    return float(sum(int((ours.cpu() != expected.cpu()).sum()) for ours, expected in pairs))
