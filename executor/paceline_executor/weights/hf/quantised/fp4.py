"""Four-bit floats of compressed-tensors: NVFP4 and MXFP4, multiplied with inputs of 16 bits.

`weight_packed` [out, in / 2] bytes of E2M1 numbers, the low half first. MXFP4: `weight_scale` [out, in / 32] of powers
of two. NVFP4: `weight_scale` [out, in / 16] of float8, and `weight_global_scale`, which divides.
"""

from collections.abc import Callable

import numpy as np

from paceline_executor.weights.grouped_rows import Float32Array, GroupedRows, GroupedTensor
from paceline_executor.weights.hf.quantised.float8 import powers_of_two
from paceline_executor.weights.hf.quantised.parts import Parts, nibbles, scales_of
from paceline_executor.weights.stored_tensor import FloatType, GroupedType

_E2M1 = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), np.float32)


def fp4_matrix(parts: Parts) -> GroupedTensor:
    """Raises ModelCorruptError or UnsupportedModelError."""
    is_nv = parts.has("weight_global_scale")
    kind, size = ("compressed-tensors-nvfp4", 16) if is_nv else ("compressed-tensors-mxfp4", 32)
    parts.check_ends(kind, "weight_packed", "weight_scale", "weight_global_scale")
    outputs, inputs = parts.shape
    octets = parts.integers("weight_packed", "u1", outputs, inputs // 2)
    if inputs % size:
        raise parts.wrong("weight_packed", f"cannot be {kind}: {size} does not divide {inputs} inputs")
    scales = _nv_scales(parts, outputs, inputs // size) if is_nv else _mx_scales(parts, outputs, inputs // size)

    def read() -> GroupedRows:
        return GroupedRows(4, nibbles(octets.as_stored().view(np.uint8)), scales(), size, table=_E2M1)

    stored = GroupedType(
        kind, 4, is_linear=False, group=size, scales=FloatType.FLOAT32 if is_nv else FloatType.BFLOAT16
    )
    return parts.grouped(stored, "weight_packed", read)


def _mx_scales(parts: Parts, *shape: int) -> Callable[[], Float32Array]:
    exponents = parts.integers("weight_scale", "u1", *shape)
    return lambda: powers_of_two(parts, exponents)


def _nv_scales(parts: Parts, *shape: int) -> Callable[[], Float32Array]:
    of_groups, of_all = parts.floats("weight_scale", *shape), parts.floats("weight_global_scale", 1)
    return lambda: scales_of(of_groups) / scales_of(of_all)
