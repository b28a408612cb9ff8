"""Stored matrices as packed ones: with their own codes where the products have such a form, else in 8 bits.

Knows which tensors of a layer take the same inputs, and the forms of `paceline_kernels.quantized_linear`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from paceline_executor.errors import UnsupportedModelError
from paceline_executor.weights.checkpoint import Checkpoint
from paceline_executor.weights.grouped_rows import Float32Array, GroupedRows, IntArray
from paceline_kernels.quantized_linear import PackedWeight, pack_int4, pack_int8, quantize
from paceline_kernels.quantized_linear.packing import GROUP, WHOLE_ROW

_LARGEST = 127 * float(np.finfo(np.float16).max)  # of weights in 8 bits, whose scales are float16
_MAX_ROUNDING = np.float32(1 / 4096)  # of scales to float16, by their largest


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    weight: PackedWeight
    order: torch.Tensor | None  # [in] int32: which input each of its inputs is; None: all are where they were
    in_8_bits: tuple[str, ...] = ()  # stored quantised, in fewer bits or with other numbers


def read_packed(
    checkpoint: Checkpoint,
    names: Sequence[str],
    orders: Sequence[IntArray | None] = (),
    *,
    keeps_order: bool = False,
) -> PackedMatrix:
    """The matrices take the same inputs; their outputs are side by side. orders: of the outputs of each; none: all are
    where they were. keeps_order: of inputs.

    Raises ModelCorruptError, or UnsupportedModelError for weights that are too large.
    """
    orders, stored = orders or [None] * len(names), [checkpoint.quantized(name) for name in names]
    parts = [part for part in stored if part is not None]
    if len(parts) == len(names):
        parts = [part if order is None else part.of_rows(order) for part, order in zip(parts, orders, strict=True)]
        packed = _as_stored(parts)
        if packed is not None and (packed.order is None or not keeps_order):
            return packed
    columns, in_8_bits = [], []
    for name, part, order in zip(names, stored, orders, strict=True):
        exact = None if part is None else _int8(part)
        integers, scales = exact or _rounded(name, checkpoint.tensor(name))
        columns.append((integers, scales) if order is None else (integers[order], scales[order]))
        if part is not None and (exact is None or part.num_bits < 8):
            in_8_bits.append(name)
    integers, scales = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return PackedMatrix(pack_int8(integers, scales), None, tuple(in_8_bits))


def _rounded(name: str, weights: Float32Array) -> tuple[npt.NDArray[np.int8], Float32Array]:
    largest = max(weights.max(), -weights.min())
    if largest > _LARGEST:
        raise UnsupportedModelError(
            f"tensor {name} has weights of up to {largest:.0e}, which 8 bits cannot hold: take --quantization none"
        )
    return quantize(weights)


def _as_stored(parts: Sequence[GroupedRows]) -> PackedMatrix | None:
    """None where matrices differ in their form, and where the products have none for it."""
    first, span = parts[0], _span(parts[0])
    is_alike = all(_form(part) == _form(first) and _orders_equal(part.order, first.order) for part in parts)
    if span is None or not is_alike or first.table is not None or first.factor != 1:
        return None
    joined = replace(
        first,
        codes=np.concatenate([part.codes for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        zeros=None if first.zeros is None else np.concatenate([_zeros(part) for part in parts]),
        minima=None
        if first.minima is None
        else np.concatenate([part.minima for part in parts if part.minima is not None]),
    )
    if not _fit_halves(joined.scales) or not _are_halves(joined.minima):
        return None
    if joined.order is None:
        weight = _pack(joined, span)
        return None if weight is None else PackedMatrix(weight, None)
    sizes = np.bincount(joined.order, minlength=joined.scales.shape[1])
    if (sizes[:-1] != joined.group).any() or not 0 < sizes[-1] <= joined.group:
        return None  # groups of other sizes than the format has
    order = np.argsort(joined.order, kind="stable")
    weight = _pack(replace(joined, codes=joined.codes[:, order], order=None), span)
    return None if weight is None else PackedMatrix(weight, torch.from_numpy(order.astype(np.int32)))


def _span(rows: GroupedRows) -> int | None:
    """Groups of 32 inputs under one scale; None where that is no power of two."""
    if rows.codes.shape[1] % GROUP:
        return None
    if rows.scales.shape[1] == 1:
        return WHOLE_ROW
    span, rest = divmod(rows.group, GROUP)
    return span if not rest and span.bit_count() == 1 else None


def _form(rows: GroupedRows) -> tuple[object, ...]:
    return rows.num_bits, rows.codes.dtype, _span(rows), rows.table is None, rows.zeros is None, rows.minima is None


def _orders_equal(first: IntArray | None, second: IntArray | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def _pack(rows: GroupedRows, span: int) -> PackedWeight | None:
    if rows.num_bits == 8:
        integers = _centred(rows)
        return None if integers is None else pack_int8(integers, rows.scales, span)
    codes, minima = rows.codes.view(np.uint8), rows.minima
    if minima is None:
        minima = -_zeros(rows) * rows.scales
        with np.errstate(over="ignore"):
            is_exact = np.array_equal(minima.astype(np.float16), minima)
        if not is_exact:
            return pack_int4(codes, rows.scales, zeros=_zeros(rows), span=span)
    return pack_int4(codes, rows.scales, minima, span=span)


def _zeros(rows: GroupedRows) -> Float32Array:
    return np.zeros_like(rows.scales) if rows.zeros is None else rows.zeros


def _centred(rows: GroupedRows) -> npt.NDArray[np.int8] | None:
    """8-bit codes less their zeros; None where that is more than int8 holds, or there are minima."""
    if rows.minima is not None or rows.table is not None or rows.factor != 1:
        return None
    if rows.zeros is None:
        return rows.codes.view(np.int8) if rows.codes.dtype == np.int8 else None
    integers = rows.codes.astype(np.int16) - rows.zeros.astype(np.int16)[:, rows.group_of_input]
    return integers.astype(np.int8) if integers.min() >= -128 and integers.max() <= 127 else None


def _fit_halves(scales: Float32Array) -> bool:
    """Nearly: file formats have scales of 16 bits, or products of two."""
    with np.errstate(over="ignore"):
        errors = np.abs(scales.astype(np.float16) - scales)
    return bool((errors <= np.abs(scales).max(initial=0) * _MAX_ROUNDING).all())


def _are_halves(minima: Float32Array | None) -> bool:
    return minima is None or bool((np.abs(minima) <= np.finfo(np.float16).max).all())


def _int8(rows: GroupedRows) -> tuple[npt.NDArray[np.int8], Float32Array] | None:
    """The same numbers in groups of 32; None where that would round them."""
    span = _span(rows)
    integers = None if span is None or rows.order is not None or not _fit_halves(rows.scales) else _centred(rows)
    if integers is None:
        return None
    return integers, rows.scales[:, rows.group_of_input[::GROUP]]
