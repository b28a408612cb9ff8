"""Four-bit floats, NVFP4 and MXFP4; inputs of products are not rounded to four bits.

`weight_packed` [out, in / 2] bytes of E2M1 numbers, the low half first; ModelOpt calls it `weight`. MXFP4:
`weight_scale` [out, in / 32] of powers of two. NVFP4: `weight_scale` [out, in / 16] of float8, and a number for the
whole: `weight_global_scale` of compressed-tensors divides, `weight_scale_2` of ModelOpt multiplies.
"""

import math
from collections.abc import Callable

import numpy as np

from paceline_executor.weights.grouped_rows import CodeArray, Float32Array, GroupedRows, GroupedTensor, StoredCodes
from paceline_executor.weights.hf.quantised.float8 import powers_of_two
from paceline_executor.weights.hf.quantised.parts import Parts, scales_of
from paceline_executor.weights.stored_tensor import FloatType, GroupedType

_E2M1 = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), np.float32)
_DIVISOR, _FACTOR = "weight_global_scale", "weight_scale_2"


def fp4_matrix(parts: Parts) -> GroupedTensor:
    """Of compressed-tensors. Raises ModelCorruptError or UnsupportedModelError."""
    if parts.has(_DIVISOR):
        return _read_matrix(parts, "compressed-tensors-nvfp4", "weight_packed", _DIVISOR)
    return _read_matrix(parts, "compressed-tensors-mxfp4", "weight_packed", None)


def modelopt_fp4_matrix(parts: Parts) -> GroupedTensor:
    """Raises as `fp4_matrix` does."""
    return _read_matrix(parts, "modelopt-nvfp4", "weight", _FACTOR)


def _read_matrix(parts: Parts, kind: str, end: str, of_whole: str | None) -> GroupedTensor:
    """of_whole: None for MXFP4."""
    parts.check_ends(kind, end, "weight_scale", *filter(None, (of_whole,)))
    outputs, inputs = parts.shape
    octets = parts.integers(end, "u1", outputs, inputs // 2)
    size = 16 if of_whole else 32
    if inputs % size:
        raise parts.wrong(end, f"cannot be {kind}: {size} does not divide {inputs} inputs")
    shape = (outputs, inputs // size)
    scales = _nv_scales(parts, of_whole, *shape) if of_whole else _mx_scales(parts, *shape)

    def scaled(codes: CodeArray) -> GroupedRows:
        return GroupedRows(4, codes, scales(), size, table=_E2M1)

    kept = FloatType.FLOAT32 if of_whole else FloatType.BFLOAT16
    stored = GroupedType(kind, 4, is_linear=False, group=size, scales=kept)
    return parts.grouped(stored, StoredCodes(octets, 4, parts.shape), scaled)


def _mx_scales(parts: Parts, *shape: int) -> Callable[[], Float32Array]:
    exponents = parts.integers("weight_scale", "u1", *shape)
    return lambda: powers_of_two(parts, exponents)


def _nv_scales(parts: Parts, of_whole: str, *shape: int) -> Callable[[], Float32Array]:
    of_groups, whole = parts.floats("weight_scale", *shape), parts.floats(of_whole)
    if math.prod(whole.shape) != 1:
        raise parts.wrong(of_whole, f"has shape {whole.shape} where one number is needed")
    combined = np.divide if of_whole == _DIVISOR else np.multiply
    return lambda: combined(scales_of(of_groups), scales_of(whole).reshape(()))
