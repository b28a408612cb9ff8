"""compressed-tensors, as llm-compressor writes: integers of 4 and 8 bits, float8, four-bit floats, also side by side.

pack-quantized: `weight_packed` [out, words] along the inputs, each number with 2 ** (bits - 1) added, `weight_scale`
[out, groups], `weight_zero_point` [words, groups] packed likewise along the outputs, `weight_g_idx` [in].
int-quantized: `weight` of signed bytes, those of 4 bits, too. Weight = (code - zero) * scale.

The scheme of a matrix is one that its tensors fit; where there is none, what is missing or too much is named.
"""

from collections.abc import Callable, Iterable
from functools import partial

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
from paceline_executor.weights.hf.quantised.float8 import Block, float8_matrix
from paceline_executor.weights.hf.quantised.fp4 import fp4_matrix
from paceline_executor.weights.hf.quantised.parts import Format, Parts, order_of, scales_of, unpack
from paceline_executor.weights.hf.quantised.schemes import Scheme, read_schemes
from paceline_executor.weights.refusals import damaged, shown
from paceline_executor.weights.stored_tensor import FloatType, GroupedType, StoredIntegers

_PACKED, _ZEROS, _ORDER = "weight_packed", "weight_zero_point", "weight_g_idx"


def compressed_tensors_format(config: JsonFields) -> Format:
    """Raises ModelCorruptError or UnsupportedModelError."""
    return partial(_read_matrix, read_schemes(config))


def _read_matrix(schemes: frozenset[Scheme], parts: Parts) -> Matrix:
    packed = parts.tensors.get(_PACKED)
    if isinstance(packed, StoredIntegers) and packed.dtype == np.uint8:
        return fp4_matrix(parts)
    if packed is not None or isinstance(parts.tensors.get("weight"), StoredIntegers):
        return _integers([scheme for scheme in schemes if not scheme.is_float], parts)
    return float8_matrix(parts, _block_of(schemes, parts))


def _block_of(schemes: Iterable[Scheme], parts: Parts) -> Block | None:
    """The one that makes as many scales as there are, else any."""
    blocks = sorted({scheme.block for scheme in schemes if scheme.block is not None})
    scale, (rows, inputs) = parts.tensors.get("weight_scale"), parts.shape
    fit = [each for each in blocks if scale and scale.shape == (-(-rows // each[0]), -(-inputs // each[1]))]
    return next(iter(fit + blocks), None)


def _integers(schemes: list[Scheme], parts: Parts) -> GroupedTensor:
    is_packed, (outputs, inputs) = parts.has(_PACKED), parts.shape
    end = _PACKED if is_packed else "weight"
    parts.check_ends("compressed-tensors", end, "weight_scale", _ZEROS, _ORDER, "weight_shape")
    if parts.has("weight_shape") and parts.integers("weight_shape", "<i8", 2).read().tolist() != [outputs, inputs]:
        raise parts.wrong("weight_shape", f"does not say {[outputs, inputs]}")
    if is_packed:
        words = parts.integers(end, "<i4", outputs, None)
        schemes = [scheme for scheme in schemes if -(-inputs * scheme.bits // 32) == words.shape[1]]
    else:
        words = parts.integers(end, "i1", outputs, inputs)
    if not schemes:
        raise parts.wrong(end, f"has {words.shape[1]} columns, and config_groups has no integers of so many bits")
    num_groups, rounds_inputs = _check_scheme(schemes, parts)
    bits = schemes[0].bits if is_packed else 8
    middle = np.float32(2 ** (bits - 1) if is_packed else 0)
    scales, zeros = _scales(parts), _zeros(parts, bits, num_groups)

    def scaled(codes: CodeArray) -> GroupedRows:
        order, size = None, inputs // num_groups
        if parts.has(_ORDER) and (parts.integers(_ORDER, "<i4", inputs).read() != -1).any():  # of nothing, older files
            order, size = order_of(parts, _ORDER, num_groups, size)
        return GroupedRows(bits, codes, scales(), size, zeros() + middle, order=order)

    stored = GroupedType(
        f"compressed-tensors-int{bits}",
        bits,
        group=inputs // num_groups,
        scales=FloatType(parts.floats("weight_scale").stored),
        has_zeros=parts.has(_ZEROS),
        is_ordered=parts.has(_ORDER),
        is_w8a8=rounds_inputs and num_groups == 1 and not (is_packed or parts.has(_ZEROS) or parts.has(_ORDER)),
    )
    return parts.grouped(stored, StoredCodes(words, bits, parts.shape), scaled)


def _check_scheme(schemes: list[Scheme], parts: Parts) -> tuple[int, bool]:
    """Groups of a row, in which all agree that the tensors fit, and whether all of these round inputs."""
    inputs, shape = parts.shape[1], parts.floats("weight_scale").shape
    num_groups = shape[1] if len(shape) == 2 else 1
    fit = [scheme for scheme in schemes if scheme.num_groups(inputs) == num_groups]
    if not fit:
        scheme = schemes[0]
        makes = scheme.num_groups(inputs) or "no whole number"
        state = f"has {num_groups} scales a row, where group_size {scheme.group} of {inputs} inputs makes {makes}"
        raise parts.wrong("weight_scale", state)
    for end, is_needed in (
        (_ZEROS, lambda scheme: not scheme.is_symmetric),
        (_ORDER, lambda scheme: scheme.is_ordered),
    ):
        if not parts.has(end) and all(map(is_needed, fit)):
            raise damaged(parts.path, f"tensor {shown(f'{parts.module}.{end}')} is missing, which config_groups needs")
    return num_groups, all(scheme.rounds_inputs for scheme in fit)


def _scales(parts: Parts) -> Callable[[], Float32Array]:
    """[out, groups] of one number, one for each row, or one for each group of a row."""
    part, outputs = parts.floats("weight_scale"), parts.shape[0]
    if part.shape not in ((), (1,), (outputs,)) and (len(part.shape) != 2 or part.shape[0] not in (1, outputs)):
        raise parts.wrong("weight_scale", f"has shape {part.shape} for {outputs} outputs")
    columns = part.shape[1] if len(part.shape) == 2 else 1
    return lambda: np.broadcast_to(scales_of(part, may_be_negative=True).reshape(-1, columns), (outputs, columns))


def _zeros(parts: Parts, bits: int, num_groups: int) -> Callable[[], Float32Array]:
    """[out, groups] for signed codes; 0 where there are none."""
    part, outputs = parts.tensors.get(_ZEROS), parts.shape[0]
    if part is None:
        return lambda: np.broadcast_to(np.float32(0), (outputs, num_groups))
    if isinstance(part, StoredIntegers) and part.dtype == np.int8:
        plain = parts.integers(_ZEROS, "i1", outputs, num_groups)
        return lambda: plain.as_stored().astype(np.float32)
    packed = parts.integers(_ZEROS, "<i4", -(-outputs * bits // 32), num_groups)
    middle = np.float32(2 ** (bits - 1))
    return lambda: unpack(packed.as_stored().T, bits)[:, :outputs].T.astype(np.float32) - middle
