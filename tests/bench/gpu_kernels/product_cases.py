"""Matrix products at the layers of Llama-3-8B or the nearest that anchors have. Knows weights of 16, 8 and 4 bits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from gpu_kernels.anchors import AnchorKey, AnchorTable
from gpu_kernels.case import Bound, Case, Place, Scale, Work, compared, type_name
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.grouped_linear import Codes, GroupedLayout, GroupedWeight, new_grouped
from paceline_kernels.grouped_linear import reference as grouped_linear_reference
from paceline_kernels.grouped_linear.triton import grouped_linear
from paceline_kernels.linear.triton import linear
from paceline_kernels.scaled_linear import ScaledWeight, quantize_rows
from paceline_kernels.scaled_linear import reference as scaled_linear_reference
from paceline_kernels.scaled_linear.triton import ROUNDED_FROM_ROWS, round_rows, scaled_linear

_LAYERS = ((4096, 4096), (6144, 4096), (16_384, 4096), (4096, 12_288))  # outputs, inputs
_GROUPED_LAYERS = ((28_672, 4096), (4096, 14_336), (6144, 4096), (4096, 4096))
_GROUPED_ROWS = (1, 8, 16, 32, 64, 128, 256, 2048)
_FP8 = torch.float8_e4m3fn
# What other stacks call weights of these types.
_ANCHOR_TYPES = {_FP8: ("fp8", "fp8_block"), torch.int8: ("int8_wo", "sq")}
_FROM_MANY = 512  # rows, from which on products decide and not the read of weights
# Of 8 bits on both sides: of float8_e4m3fn 2**-4 / sqrt(3) of a number, of int8 0.5 / sqrt(3) of 127 / 4 of all.
_ROUNDED_ROWS_ERRORS = {_FP8: 4e-2, torch.int8: 2e-2}


@dataclass(frozen=True, slots=True)
class Grouped:
    """What grouped weights are."""

    codes: Codes
    group: int
    has_zeros: bool = False
    has_minima: bool = False

    def __str__(self) -> str:
        bits = "fp8" if self.codes is Codes.FLOAT8 else self.codes.name.lower()
        return f"{bits} g{self.group}" + " zeros" * self.has_zeros + " minima" * self.has_minima

    def weight(self, place: Place, num_outputs: int, num_inputs: int, seed: int) -> GroupedWeight:
        """Of any codes, but for NaN, and scales that give sums of about 1."""
        middle = {Codes.INT4: 8, Codes.INT8: 128}.get(self.codes, 0)
        made = new_grouped(
            GroupedLayout(num_outputs, num_inputs, self.group, self.codes, middle),
            place.device,
            torch.float32 if self.has_minima else place.dtype,  # of K-quants, products of two numbers
            has_zeros=self.has_zeros,
            minima_type=torch.float32 if self.has_minima else None,
            table=place.normal(16, seed=seed) if self.codes is Codes.TABLE else None,
        )
        if place.device.type != "meta":
            never_nan = 0x77777777 if self.codes is Codes.FLOAT8 else -1
            made.words.copy_(place.integers((1 << 31) - 1, *made.words.shape, seed=seed) & never_nan)
            made.scales.fill_(0.1 / num_inputs**0.5)
            for offsets in (made.zeros, made.minima):
                _ = None if offsets is None else offsets.fill_(1)
        return made


W4A16, AWQ, BLOCKS = Grouped(Codes.INT4, 128), Grouped(Codes.INT4, 128, has_zeros=True), Grouped(Codes.FLOAT8, 128)
Q4_K = Grouped(Codes.INT4, 32, has_minima=True)
FORMS = (W4A16, AWQ, BLOCKS, Q4_K, Grouped(Codes.INT8, 32), Grouped(Codes.TABLE, 64))


def cases(scale: Scale, place: Place) -> Iterator[Case]:
    yield from _grouped(scale, place)
    if scale is Scale.ODD:
        yield linear_case(place, 3, 63, 100)
        yield from (scaled_linear_case(place, 3, 63, 100, dtype) for dtype in (_FP8, torch.int8))
        return
    few = (1, 16) if scale is Scale.QUICK else (1, 4, 16, 64)
    for layer in _LAYERS[:2] if scale is Scale.QUICK else _LAYERS:
        yield from (scaled_linear_case(place, num_rows, *layer, _FP8) for num_rows in few)
    for layer in _LAYERS[:1] if scale is Scale.QUICK else _LAYERS[1:3]:
        for num_rows in (1, 16):
            yield linear_case(place, num_rows, *layer)
            yield scaled_linear_case(place, num_rows, *layer, torch.int8)
    if scale is Scale.FULL:
        yield linear_case(place, 2048, 6144, 4096)
        yield from (scaled_linear_case(place, 2048, 6144, 4096, dtype) for dtype in (_FP8, torch.int8))
        yield from (scaled_linear_case(place, num_rows, 28_672, 4096, torch.int8) for num_rows in (128, 2048))


def _grouped(scale: Scale, place: Place) -> Iterator[Case]:
    if scale is Scale.ODD:
        yield from (grouped_linear_case(place, 3, 63, 200, form) for form in FORMS)
        return
    for layer in _GROUPED_LAYERS:
        is_first = layer == _GROUPED_LAYERS[0]
        for num_rows in _GROUPED_ROWS if is_first or scale is Scale.FULL else _GROUPED_ROWS[:1]:
            forms = FORMS if is_first and num_rows in (1, 16) else (W4A16, AWQ, BLOCKS)
            yield from (grouped_linear_case(place, num_rows, *layer, form) for form in forms)


def linear_case(
    place: Place, num_rows: int, num_outputs: int, num_inputs: int, splits: Splits = Splits.EVEN, *, adds: bool = False
) -> Case:
    """With weights of x's type. adds: a bias."""

    def build(seed: int) -> Work:
        x, weight = place.normal(num_rows, num_inputs, seed=seed), place.normal(num_outputs, num_inputs, seed=seed + 1)
        bias = place.normal(num_outputs, seed=seed + 2) if adds else None

        def expected() -> torch.Tensor:
            return functional.linear(x.double(), weight.double(), None if bias is None else bias.double())

        return compared(lambda: linear(x, weight, bias, splits), expected, lambda: functional.linear(x, weight))

    key = AnchorKey(AnchorTable.GEMM, ("bfloat16",), (num_rows, num_outputs, num_inputs))
    return _case("linear", place, key, place.dtype, build)


def scaled_linear_case(
    place: Place,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    splits: Splits = Splits.EVEN,
) -> Case:

    def build(seed: int) -> Work:
        x = place.normal(num_rows, num_inputs, seed=seed)
        weight = quantize_rows(place.normal(num_outputs, num_inputs, seed=seed + 1), dtype)

        return compared(
            lambda: scaled_linear(x, weight, None, splits),
            lambda: scaled_linear_reference.scaled_linear(x, weight),
            _theirs(x, weight),
        )

    key = AnchorKey(AnchorTable.GEMM, _ANCHOR_TYPES[dtype], (num_rows, num_outputs, num_inputs))
    return _case("scaled linear", place, key, dtype, build)


def grouped_linear_case(
    place: Place, num_rows: int, num_outputs: int, num_inputs: int, form: Grouped, splits: Splits = Splits.EVEN
) -> Case:
    """Beside our own product of the same shape by weights of 16 bits, or of float8 with a scale per output."""

    def build(seed: int) -> Work:
        x = place.normal(num_rows, num_inputs, seed=seed)
        weight = form.weight(place, num_outputs, num_inputs, seed + 1)
        dense = place.normal(num_outputs, num_inputs, seed=seed + 2)

        return compared(
            lambda: grouped_linear(x, weight, None, splits),
            lambda: grouped_linear_reference.grouped_linear(x, weight),
            _by_row(x, dense) if form.codes is Codes.FLOAT8 else lambda: linear(x, dense, None, Splits.EVEN),
        )

    layout = form.weight(Place(torch.device("meta"), place.dtype), num_outputs, num_inputs, 0)
    return Case(
        op="grouped linear",
        shape={"m": num_rows, "n": num_outputs, "k": num_inputs, "weight": str(form)},
        bound=Bound.MEMORY if num_rows < _FROM_MANY else Bound.PRODUCTS,
        num_bytes=layout.num_bytes + num_rows * (num_inputs + num_outputs) * place.dtype.itemsize,
        num_flops=2 * num_rows * num_outputs * num_inputs,
        build=build,
        allowed_error=place.rounding,
    )


def _by_row(x: torch.Tensor, dense: torch.Tensor) -> Callable[[], object]:
    weight = quantize_rows(dense, _FP8)
    return lambda: scaled_linear(x, weight, None, Splits.EVEN)


def _theirs(x: torch.Tensor, weight: ScaledWeight) -> Callable[[], object] | None:
    """The library's product of rows that are rounded already, where it has one."""
    if weight.values.dtype != _FP8 or x.device.type != "cuda":
        return None
    rounded = round_rows(x, _FP8)
    by_row = functional.ScalingType.RowWise
    columns, column_scales = weight.values.t(), weight.scales[None]

    def theirs() -> torch.Tensor:
        return functional.scaled_mm(
            rounded.numbers,
            columns,
            rounded.scales,
            by_row,
            column_scales,
            by_row,
            output_dtype=x.dtype,
            use_fast_accum=True,
        )

    return theirs


def _case(op: str, place: Place, key: AnchorKey, weight_type: torch.dtype, build: Callable[[int], Work]) -> Case:
    num_rows, num_outputs, num_inputs = key.sizes
    activations = num_rows * (num_inputs + num_outputs) * place.dtype.itemsize
    is_rounded = num_rows >= ROUNDED_FROM_ROWS and weight_type in _ROUNDED_ROWS_ERRORS
    return Case(
        op=op,
        shape={"m": num_rows, "n": num_outputs, "k": num_inputs, "weight": type_name(weight_type)},
        bound=Bound.MEMORY if num_rows < _FROM_MANY else Bound.FP8_PRODUCTS if is_rounded else Bound.PRODUCTS,
        num_bytes=num_outputs * num_inputs * weight_type.itemsize + activations,
        num_flops=2 * num_rows * num_outputs * num_inputs,
        build=build,
        allowed_error=_ROUNDED_ROWS_ERRORS[weight_type] if is_rounded else place.rounding,
        anchor=key,
    )
