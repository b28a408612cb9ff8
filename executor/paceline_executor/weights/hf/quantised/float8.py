"""float8_e4m3fn: a scale for all weights or each output, or one for each block of outputs and inputs.

So write DeepSeek and transformers (`fp8`), `fbgemm_fp8`, ModelOpt and compressed-tensors. `weight_scale_inv` is a
factor like any other, whatever it is called. Blocks at the edges are cut off. The scale may be a power of two, by its
exponent alone.
"""

from dataclasses import replace

import numpy as np

from paceline_executor.weights.grouped_rows import (
    CodeArray,
    Float32Array,
    GroupedRows,
    GroupedTensor,
    Matrix,
    StoredCodes,
)
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.quantised.parts import Format, Part, Parts, scales_of
from paceline_executor.weights.refusals import damaged, shown, wrong
from paceline_executor.weights.stored_checkpoint import FLOAT8_NUMBERS
from paceline_executor.weights.stored_tensor import FloatType, GroupedType, StoredIntegers, StoredTensor

Block = tuple[int, int]  # outputs, inputs
_MAX_BLOCK = 1 << 20
_NAMES = ("weight_scale", "weight_scale_inv")


def float8_format(config: JsonFields) -> Format:
    """Raises ModelCorruptError."""
    block = read_block(config, "weight_block_size")
    return lambda parts: float8_matrix(parts, block)


def read_block(config: JsonFields, field: str) -> Block | None:
    """Raises ModelCorruptError."""
    if config.get(field) is None:
        return None
    rows, columns = config.positive_numbers(field, 2)
    if rows % 1 or columns % 1 or max(rows, columns) > _MAX_BLOCK:
        raise config.fault(field, "not two whole numbers of rows and columns")
    return int(rows), int(columns)


def float8_matrix(parts: Parts, block: Block | None) -> Matrix:
    """Raises ModelCorruptError or UnsupportedModelError."""
    parts.check_ends("float8", "weight", *_NAMES)
    weight = parts.floats("weight", *parts.shape)
    if weight.stored is not FloatType.FLOAT8_E4M3FN:
        raise parts.wrong("weight", f"is of type {weight.stored.value} where float8_e4m3fn is needed")
    names = [name for name in _NAMES if parts.has(name)]
    if not names:
        raise damaged(weight.source.path, f"float8 tensor {shown(weight.name)} has no scale beside it")
    scale = parts.tensors[names[0]]
    if isinstance(scale, StoredTensor) and scale.stored is not FloatType.FLOAT8_E4M3FN and _is_for_rows(scale, parts):
        return replace(weight, scales=replace(scale, shape=scale.shape[:1]))
    return _blocks(parts, weight, scale, block)


def _is_for_rows(scale: StoredTensor, parts: Parts) -> bool:
    return scale.shape in ((), (1,), (1, 1), parts.shape[:1], (parts.shape[0], 1))


def _blocks(parts: Parts, weight: StoredTensor, scale: Part, block: Block | None) -> GroupedTensor:
    rows, columns = parts.shape
    kind = f"tensor {shown(scale.name)} is of shape {scale.shape}, neither one number nor one for each of {rows} rows"
    if block is None:
        raise wrong(scale.source.path, f"{kind}, and no size of blocks is given")
    if scale.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise wrong(scale.source.path, f"{kind} or block of {block[0]} x {block[1]}")

    def scaled(codes: CodeArray) -> GroupedRows:
        of_rows = _numbers(parts, scale)[np.arange(rows) // block[0]]
        return GroupedRows(8, codes, of_rows, block[1], table=FLOAT8_NUMBERS)

    # Powers of two are bfloat16, too.
    kept = FloatType(scale.stored) if isinstance(scale, StoredTensor) else FloatType.BFLOAT16
    stored = GroupedType("float8_e4m3fn-blocks", 8, is_linear=False, group=block[1], scales=kept)
    return parts.grouped(stored, StoredCodes(weight, 8, parts.shape), scaled)


def _numbers(parts: Parts, scale: Part) -> Float32Array:
    if isinstance(scale, StoredIntegers):
        return powers_of_two(parts, scale)
    return scales_of(scale)


def powers_of_two(parts: Parts, exponents: StoredIntegers) -> Float32Array:
    """E8M0 numbers: 2 ** (byte - 127), 255 is not a number. Raises ModelCorruptError."""
    octets = exponents.as_stored()
    if exponents.dtype != np.uint8 or (octets == 255).any():
        raise damaged(parts.path, f"tensor {shown(exponents.name)} holds values that are not finite")
    return np.ldexp(np.float32(1), octets.astype(np.int32) - 127)
