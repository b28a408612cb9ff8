"""Quantised matrices as `grouped_linear` wants them: from rows that were read, or, without numbers, from their types.

Knows what kernels have a form for: of other matrices there is none, and they become dense. Refuses to know formats.
"""

from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt
import torch

from paceline_executor.upload.conversion import TORCH_TYPES
from paceline_executor.weights.grouped_rows import GroupedRows
from paceline_executor.weights.stored_checkpoint import FLOAT8_NUMBERS
from paceline_executor.weights.stored_tensor import GroupedType
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.grouped_linear import Codes, GroupedLayout, GroupedWeight, new_grouped, pack_grouped
from paceline_kernels.grouped_linear.weights import TILE_OUTPUTS

_LARGEST_ZERO = 255
_OF_OUTPUTS = ("words", "scales", "zeros", "minima")  # fields of a weight that have a tile of outputs first


def expected_weight(
    stored: GroupedType, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> GroupedWeight | None:
    """One without numbers, to write them into or for torch's device `meta`; what is read may turn out plainer."""
    num_outputs, num_inputs = shape
    codes = _CODES[stored.bits, stored.is_linear]
    middle = 1 << stored.bits - 1 if stored.is_linear and not stored.has_minima else 0
    scales = TORCH_TYPES[stored.scales]
    return _new(
        GroupedLayout(num_outputs, num_inputs, stored.group or num_inputs, codes, middle),
        device,
        scales,
        has_zeros=stored.has_zeros,
        minima_type=scales if stored.has_minima else None,
        table=torch.empty(16, dtype=dtype, device=device) if codes is Codes.TABLE else None,
        order=torch.empty(num_inputs, dtype=torch.int64, device=device) if stored.is_ordered else None,
    )


def grouped_weight(
    rows: GroupedRows, codes: torch.Tensor, stored: GroupedType, dtype: torch.dtype
) -> GroupedWeight | None:
    """codes: on the device, instead of those of the rows. dtype: that is computed with; numbers of a table are rounded
    to it. None where kernels have no form for it.
    """
    (num_outputs, num_inputs), device = codes.shape, codes.device
    kind, table = _CODES[rows.num_bits, rows.table is None], None
    if kind is Codes.TABLE:
        table = _moved(np.asarray(rows.table), device).to(dtype)
    if kind is Codes.FLOAT8 and not np.array_equal(np.asarray(rows.table), FLOAT8_NUMBERS, equal_nan=True):
        return None
    middle, zeros = 0, rows.zeros
    if codes.dtype == torch.int8:
        middle, zeros = 128, None if zeros is None else zeros + 128
    elif zeros is not None:
        middle = 1 << rows.num_bits - 1
    if zeros is not None and (zeros == middle).all():
        zeros = None
    order, is_even = _order(rows)
    if not is_even or (zeros is not None and (zeros.min() < 0 or zeros.max() > _LARGEST_ZERO)):
        return None
    scales = np.asarray(rows.scales * np.float32(rows.factor))
    scales_type = TORCH_TYPES[stored.scales] if rows.factor == 1 else torch.float32
    weight = _new(
        GroupedLayout(num_outputs, num_inputs, rows.group, kind, middle),
        device,
        scales_type,
        has_zeros=zeros is not None,
        table=table,
        order=None if order is None else _moved(order, device),
    )
    if weight is None:
        return None
    for first, part in replace(rows, scales=scales, zeros=zeros).parts():
        zeros_here = None if part.zeros is None else _moved(part.zeros, device)
        places = slice(first, first + len(part.codes))
        pack_grouped(weight, places, codes[places], _moved(part.scales, device), zeros_here)
    return weight


def joined(first: GroupedWeight, second: GroupedWeight) -> GroupedWeight | None:
    """One below the other, where they have one scheme and one order of inputs; None where not."""
    layout, num_outputs = first.layout, second.layout.num_outputs
    has_whole_tiles = layout.num_outputs % 16 == 0
    if not has_whole_tiles or replace(layout, num_outputs=num_outputs) != second.layout or not _is_alike(first, second):
        return None
    stacked = {
        name: torch.cat((getattr(first, name), getattr(second, name)))
        for name in _OF_OUTPUTS
        if getattr(first, name) is not None
    }
    return replace(first, layout=replace(layout, num_outputs=layout.num_outputs + num_outputs), **stacked)


def stack_of(first: GroupedWeight, count: int) -> GroupedWeight:
    """Room for as many of its scheme one below the other, each of whole tiles, to be `put` there."""

    def room(one: torch.Tensor | None) -> torch.Tensor | None:
        return None if one is None else one.new_empty((count * one.shape[0], *one.shape[1:]))

    words, scales = room(first.words), room(first.scales)
    assert words is not None
    assert scales is not None
    layout = replace(first.layout, num_outputs=count * first.layout.num_outputs)
    return replace(first, layout=layout, words=words, scales=scales, zeros=room(first.zeros), minima=room(first.minima))


def put(stack: GroupedWeight, place: int, weight: GroupedWeight) -> GroupedWeight | None:
    """Write one of a stack. Returns the stack, which has zeros once one of them has; None for one of another scheme."""
    if (weight.zeros is None) != (stack.zeros is None):
        stack, weight = (each if each.zeros is not None else _with_zeros(each) for each in (stack, weight))
    if replace(weight.layout, num_outputs=stack.layout.num_outputs) != stack.layout or not _is_alike(stack, weight):
        return None
    num_tiles = weight.layout.num_output_tiles
    for to, part in zip(_of_outputs(stack), _of_outputs(weight), strict=True):
        to[place * num_tiles : (place + 1) * num_tiles] = part
    return stack


def reordered(weight: GroupedWeight, rows: torch.Tensor) -> GroupedWeight:
    """The same outputs in another order. rows: [out], which one comes where."""
    layout = weight.layout
    places = torch.arange(TILE_OUTPUTS * layout.num_output_tiles, device=rows.device)
    places[: layout.num_outputs] = rows

    def moved(part: torch.Tensor) -> torch.Tensor:
        by_output = part.transpose(1, 2).flatten(0, 1)[places]
        return by_output.view(-1, TILE_OUTPUTS, *by_output.shape[1:]).transpose(1, 2).contiguous()

    zeros, minima = (None if part is None else moved(part) for part in (weight.zeros, weight.minima))
    return replace(weight, words=moved(weight.words), scales=moved(weight.scales), zeros=zeros, minima=minima)


def _with_zeros(weight: GroupedWeight) -> GroupedWeight:
    """Those that it has without saying so."""
    return replace(weight, zeros=torch.full_like(weight.scales, weight.layout.middle, dtype=torch.uint8))


def _of_outputs(weight: GroupedWeight) -> list[torch.Tensor]:
    return [part for part in (getattr(weight, name) for name in _OF_OUTPUTS) if part is not None]


def _is_alike(one: GroupedWeight, other: GroupedWeight) -> bool:
    for field in fields(one)[1:]:
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if (ours is None) != (theirs is None) or (ours is not None and ours.dtype != theirs.dtype):
            return False
        if ours is not None and field.name in ("table", "order") and not (ours.is_meta or torch.equal(ours, theirs)):
            return False
    return True


def _new(
    layout: GroupedLayout,
    device: torch.device,
    scales_type: torch.dtype,
    *,
    has_zeros: bool,
    table: torch.Tensor | None,
    order: torch.Tensor | None,
    minima_type: torch.dtype | None = None,
) -> GroupedWeight | None:
    try:
        return new_grouped(
            layout, device, scales_type, has_zeros=has_zeros, minima_type=minima_type, table=table, order=order
        )
    except KernelArgumentError:  # groups that lie across tiles
        return None


def _order(rows: GroupedRows) -> tuple[npt.NDArray[np.intp] | None, bool]:
    """(which input each code is for, sorted by groups; whether groups are then of one size)."""
    if rows.order is None:
        return None, True
    order = np.argsort(rows.order, kind="stable")
    return order, np.array_equal(rows.order[order], np.arange(len(order)) // rows.group)


def _moved(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.require(array, requirements=("C", "W"))).to(device)


_CODES = {(4, True): Codes.INT4, (8, True): Codes.INT8, (4, False): Codes.TABLE, (8, False): Codes.FLOAT8}
