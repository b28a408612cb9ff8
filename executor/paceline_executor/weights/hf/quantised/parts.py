"""The tensors that one matrix is made of, and what every format asks of them: types, shapes, scales that can be.

Refuses to know formats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline_executor.errors import ModelCorruptError
from paceline_executor.weights.grouped_rows import (
    CodeArray,
    Float32Array,
    GroupedRows,
    GroupedTensor,
    IntArray,
    Matrix,
    StoredCodes,
    nibbles,
)
from paceline_executor.weights.refusals import damaged, shown, unsupported, wrong
from paceline_executor.weights.stored_checkpoint import as_float32
from paceline_executor.weights.stored_tensor import ByteArray, FloatType, GroupedType, StoredIntegers, StoredTensor

Part = StoredTensor | StoredIntegers
# What is multiplied with weights is measured anew in each step, and not bounded.
_OF_INPUTS = frozenset(("input_scale", "input_zero_point", "input_scale_ub", "input_global_scale", "activation_scale"))
# Tools leave them beside weights that they did not quantise, or have rounded in place.
_BESIDE_FLOATS = _OF_INPUTS | {"weight_scale", "weight_scale_inv", "weight_zero_point"}


@dataclass(frozen=True, slots=True)
class Parts:
    """They are of at least one tensor."""

    module: str  # such as "model.layers.0.mlp.up_proj"
    shape: tuple[int, int]  # of the matrix: [out, in]
    tensors: Mapping[str, Part]  # by what follows the module's name, such as "qweight"

    @property
    def path(self) -> Path:
        return next(iter(self.tensors.values())).source.path

    @property
    def plain(self) -> StoredTensor | None:
        """The weight where it is one of floats."""
        weight = self.tensors.get("weight")
        if not isinstance(weight, StoredTensor) or weight.stored is FloatType.FLOAT8_E4M3FN:
            return None
        return weight if self.tensors.keys() <= _BESIDE_FLOATS | {"weight"} else None

    def has(self, end: str) -> bool:
        return end in self.tensors

    def check_ends(self, kind: str, *known: str) -> None:
        """Raises UnsupportedModelError for a tensor that a matrix of this kind does not have."""
        surplus = self.tensors.keys() - _OF_INPUTS - set(known)
        if surplus:
            name = self.tensors[min(surplus)].name
            raise unsupported(self.path, f"it has a tensor {shown(name)}, which a matrix of {kind} does not have")

    def part(self, end: str) -> Part:
        """Raises ModelCorruptError where there is none."""
        if end not in self.tensors:
            found = ", ".join(sorted(self.tensors))
            raise damaged(self.path, f"tensor {shown(f'{self.module}.{end}')} is missing beside its {found}")
        return self.tensors[end]

    def integers(self, end: str, dtype: str, *shape: int | None) -> StoredIntegers:
        """None in a shape is any number. Raises ModelCorruptError for another type or shape, or where there is none."""
        part = self.part(end)
        if not isinstance(part, StoredIntegers) or part.dtype != np.dtype(dtype):
            raise self._mistyped(part, np.dtype(dtype).name)
        self._check_shape(part, shape)
        return part

    def floats(self, end: str, *shape: int | None) -> StoredTensor:
        """Raises as `integers` does."""
        part = self.part(end)
        if not isinstance(part, StoredTensor):
            raise self._mistyped(part, "floats")
        if shape:
            self._check_shape(part, shape)
        return part

    def wrong(self, end: str, state: str) -> ModelCorruptError:
        part = self.tensors[end]
        return wrong(part.source.path, f"tensor {shown(part.name)} {state}")

    def grouped(
        self, stored: GroupedType, codes: StoredCodes, scaled: Callable[[CodeArray], GroupedRows]
    ) -> GroupedTensor:
        num_bytes = sum(each.num_bytes for each in self.tensors.values())

        def quietly(numbers: CodeArray) -> GroupedRows:
            with np.errstate(all="ignore"):  # garbage overflows, and whoever takes the numbers looks at what came out
                return scaled(numbers)

        return GroupedTensor(codes, stored, num_bytes, quietly)

    def _mistyped(self, part: Part, needed: str) -> ModelCorruptError:
        found = part.dtype.name if isinstance(part, StoredIntegers) else getattr(part.stored, "value", "")
        return wrong(part.source.path, f"tensor {shown(part.name)} is of type {found} where {needed} is needed")

    def _check_shape(self, part: Part, shape: tuple[int | None, ...]) -> None:
        expected = tuple(found if size is None else size for size, found in zip(shape, part.shape, strict=False))
        if part.shape != expected or len(part.shape) != len(shape):
            needed = ", ".join("any" if size is None else str(size) for size in shape)
            state = f"has shape {part.shape} where ({needed}) is needed for {self.shape} weights"
            raise wrong(part.source.path, f"tensor {shown(part.name)} {state}")


Format = Callable[[Parts], Matrix]
"""Raises ModelCorruptError or UnsupportedModelError for parts that are not of it."""


def scales_of(part: StoredTensor, *, may_be_negative: bool = False) -> Float32Array:
    """Raises ModelCorruptError where they are not finite, are all 0, as a hole in a file is, or have a wrong sign."""
    scales = as_float32(part)
    if not scales.any():
        raise damaged(part.source.path, f"tensor {shown(part.name)} has no scale but 0")
    if not may_be_negative and scales.min() < 0:
        raise damaged(part.source.path, f"tensor {shown(part.name)} has a scale below 0")
    return scales


def order_of(parts: Parts, end: str, num_groups: int, group: int) -> tuple[IntArray | None, int]:
    """The group of each input where neighbours do not share one, and the size of a group; `group` is a guess of it.

    Raises ModelCorruptError for a group that is not there, or has no input.
    """
    num_inputs = parts.shape[1]
    order = parts.integers(end, "<i4", num_inputs).read()
    if num_groups > 1 and not order.any():  # some tools fill it with zeros for neighbours
        return None, group
    if order.min() < 0 or order.max() >= num_groups:
        beyond = order.min() if order.min() < 0 else order.max()
        raise parts.wrong(end, f"leads to group {beyond}, and there are {num_groups}")
    sizes = np.bincount(order, minlength=num_groups)
    if not sizes.all():
        raise parts.wrong(end, f"leads to {np.count_nonzero(sizes)} of {num_groups} groups")
    size = int(sizes[0])
    is_plain = np.array_equal(order, np.arange(num_inputs) // size)
    return (None, size) if is_plain else (order, size)


def unpack(words: npt.NDArray[np.generic], bits: int) -> ByteArray:
    """Numbers of 4 or 8 bits along the last axis, those in the lowest bits of a word first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return octets if bits == 8 else nibbles(octets)
