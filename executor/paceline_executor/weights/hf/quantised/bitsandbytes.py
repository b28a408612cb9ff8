"""bitsandbytes: NF4 and FP4, whose scales may be quantised in their turn, and LLM.int8.

4 bits: `weight` holds the codes of the flat matrix, two in a byte, the first one in the upper half, whatever type its
bytes are declared as; blocks of 64 of it share an `absmax`, across the ends of rows. 8 bits: weight * SCB * (1 / 127).
Of LLM.int8 the inputs that stay in 16 bits there are no matter: here all do.
"""

import math

import numpy as np

from paceline_executor.weights.grouped_rows import CodeArray, Float32Array, GroupedRows, GroupedTensor, StoredCodes
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.quantised.parts import Parts, scales_of
from paceline_executor.weights.refusals import damaged, shown, unsupported
from paceline_executor.weights.stored_tensor import GroupedType, StoredIntegers, StoredTensor

_STATE = "weight.quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_MAX_STATE_BYTES = 1 << 16
_MAX_BLOCK = 1 << 16
_ONE_127TH = float(np.float32(1 / 127))


def bitsandbytes_matrix(parts: Parts) -> GroupedTensor:
    """See `Format`."""
    return _int8(parts) if parts.has("SCB") else _four_bits(parts)


def _int8(parts: Parts) -> GroupedTensor:
    parts.check_ends("LLM.int8", "weight", "SCB", "weight_format")
    weight, scales = parts.integers("weight", "i1", *parts.shape), parts.floats("SCB", parts.shape[0])
    if parts.has("weight_format") and parts.integers("weight_format", "u1").read().any():
        raise unsupported(parts.path, f"{parts.module} has its rows in an order of some GPU; plain ones are read")

    def scaled(codes: CodeArray) -> GroupedRows:
        return GroupedRows(8, codes, scales_of(scales)[:, None], parts.shape[1], factor=_ONE_127TH)

    return parts.grouped(GroupedType("bitsandbytes-int8", 8), StoredCodes(weight, 8, parts.shape), scaled)


def _four_bits(parts: Parts) -> GroupedTensor:
    kind = next((kind for kind in _KINDS if parts.has(_STATE + kind)), None)
    if kind is None:
        raise damaged(parts.path, f"{parts.module} has neither SCB nor {_STATE}nf4 or fp4 beside its weight")
    nested = ("weight.nested_absmax", "weight.nested_quant_map")
    parts.check_ends(f"bitsandbytes {kind}", "weight", _STATE + kind, "weight.absmax", "weight.quant_map", *nested)
    rows, inputs = parts.shape
    num_numbers = rows * inputs
    state = _read_state(parts, _STATE + kind)
    block = state.positive_integer("blocksize", _MAX_BLOCK)
    if state.get("shape") != [rows, inputs]:
        raise state.fault(
            "shape", f"{shown(str(state.get('shape')))} of {parts.module}, where {[rows, inputs]} is needed"
        )
    weight, num_bytes = parts.part("weight"), -(-num_numbers // 2)
    if weight.num_bytes != num_bytes:
        raise parts.wrong("weight", f"has {weight.num_bytes} bytes where {num_bytes} are needed")
    num_blocks = -(-num_numbers // block)
    table = parts.floats("weight.quant_map", 16)
    is_nested = parts.has(nested[0])
    absmax = (
        parts.integers("weight.absmax", "u1", num_blocks) if is_nested else parts.floats("weight.absmax", num_blocks)
    )

    def scaled(codes: CodeArray) -> GroupedRows:
        scales = scales_of(absmax) if isinstance(absmax, StoredTensor) else _unnested(parts, absmax, state)
        size = math.gcd(inputs, block)  # no group ends within a block, nor beyond a row
        of_groups = scales[np.arange(num_numbers // size) * size // block].reshape(rows, -1)
        return GroupedRows(4, codes, of_groups, size, table=_table(table))

    stored = GroupedType(f"bitsandbytes-{kind}", 4, is_linear=False, group=math.gcd(inputs, block))
    return parts.grouped(stored, StoredCodes(weight, 4, parts.shape, high_first=True), scaled)


def _unnested(parts: Parts, absmax: StoredIntegers, state: JsonFields) -> Float32Array:
    size = state.positive_integer("nested_blocksize", _MAX_BLOCK)
    offset = state.number("nested_offset")
    if offset is None:
        raise state.fault("nested_offset", "missing")
    scales = parts.floats("weight.nested_absmax", -(-absmax.shape[0] // size))
    numbers = _table(parts.floats("weight.nested_quant_map", 256))[absmax.as_stored().view(np.uint8)]
    numbers *= scales_of(scales)[np.arange(numbers.size) // size]
    numbers += np.float32(offset)
    return numbers


def _table(table: StoredTensor) -> Float32Array:
    return scales_of(table, may_be_negative=True)


def _read_state(parts: Parts, end: str) -> JsonFields:
    part = parts.integers(end, "u1", None)
    if part.num_bytes > _MAX_STATE_BYTES:
        raise parts.wrong(end, f"has {part.num_bytes} bytes, more than the {_MAX_STATE_BYTES} allowed")
    return JsonFields.parse(part.source.path, part.as_stored().tobytes(), f"tensor {shown(part.name)}")
