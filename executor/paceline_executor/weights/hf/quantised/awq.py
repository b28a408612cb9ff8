"""AWQ: 4 bits with a zero for each group, as AutoAWQ and GPTQModel write them.

gemm: `qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]; eight outputs stand in a word in the
order 0 2 4 6 1 3 5 7. gemv: `qweight` [out, in / 8], `qzeros` [out, words], `scales` [out, columns], in plain order,
the last two filled up. Weight = (code - zero) * scale.
"""

from functools import partial

import numpy as np

from paceline_executor.weights.grouped_rows import CodeArray, GroupedRows, GroupedTensor, StoredCodes
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.quantised.gptq import group_size, read_bits
from paceline_executor.weights.hf.quantised.parts import Format, Parts, scales_of, unpack
from paceline_executor.weights.refusals import shown, unsupported
from paceline_executor.weights.stored_tensor import FloatType, GroupedType

_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word, those in its lowest bits first
_VERSIONS = ("gemm", "gemv")


def awq_format(config: JsonFields) -> Format:
    """Raises ModelCorruptError or UnsupportedModelError."""
    return partial(_read_matrix, _group_size(config))


def awq_type(config: JsonFields) -> GroupedType:
    """Of all matrices. Raises as `awq_format` does."""
    return _stored(_group_size(config) or 0, FloatType.BFLOAT16)


def _group_size(config: JsonFields) -> int | None:
    """Of a configuration that can be read, else it raises."""
    version = (config.text("version") or config.text("checkpoint_format") or "gemm").lower()
    if version not in _VERSIONS:
        raise unsupported(config.path, f"its weights are awq in the layout {shown(version)}; gemm and gemv are read")
    # Settings that were called otherwise in 2023.
    config = config.with_defaults({"bits": config.get("w_bit"), "group_size": config.get("q_group_size")})
    read_bits(config, "bits", "awq", (4,), default=4)
    return group_size(config)


def _read_matrix(group: int | None, parts: Parts) -> GroupedTensor:
    parts.check_ends("awq", "qweight", "qzeros", "scales")
    outputs, inputs = parts.shape
    size = inputs if group is None else group
    if inputs % size:
        raise parts.wrong("qweight", f"cannot be awq: group_size {size} does not divide {inputs} inputs")
    is_gemv = parts.floats("scales", None, None).shape[0] == outputs
    if (inputs if is_gemv else outputs) % 8:
        raise parts.wrong("qweight", f"cannot be awq: words hold 8 codes, of {outputs} outputs and {inputs} inputs")
    return _gemv(parts, size) if is_gemv else _gemm(parts, size)


def _gemm(parts: Parts, size: int) -> GroupedTensor:
    outputs, inputs = parts.shape
    words = parts.integers("qweight", "<i4", inputs, outputs // 8)
    zeros = parts.integers("qzeros", "<i4", inputs // size, outputs // 8)
    scales = parts.floats("scales", inputs // size, outputs)

    def scaled(codes: CodeArray) -> GroupedRows:
        numbers = packed(zeros, shape=(outputs, inputs // size)).read().astype(np.float32)
        return GroupedRows(4, codes, scales_of(scales, may_be_negative=True).T, size, numbers)

    packed = partial(StoredCodes, num_bits=4, is_transposed=True, outputs_of_word=_OUTPUTS)
    return parts.grouped(_stored(size, FloatType(scales.stored)), packed(words, shape=parts.shape), scaled)


def _stored(size: int, scales: FloatType) -> GroupedType:
    return GroupedType("awq-int4", 4, group=size, scales=scales, has_zeros=True)


def _gemv(parts: Parts, size: int) -> GroupedTensor:
    outputs, inputs = parts.shape
    num_groups = inputs // size
    words = parts.integers("qweight", "<i4", outputs, inputs // 8)
    zeros = parts.integers("qzeros", "<i4", outputs, None)
    scales = parts.floats("scales", outputs, None)
    for end, columns in (("qzeros", zeros.shape[1] * 8), ("scales", scales.shape[1])):
        if columns < num_groups:
            raise parts.wrong(end, f"has {columns} columns for {num_groups} groups")

    def scaled(codes: CodeArray) -> GroupedRows:
        numbers = unpack(zeros.as_stored(), 4)[:, :num_groups].astype(np.float32)
        factors = scales_of(scales, may_be_negative=True)[:, :num_groups]
        return GroupedRows(4, codes, factors, size, numbers)

    return parts.grouped(_stored(size, FloatType(scales.stored)), StoredCodes(words, 4, parts.shape), scaled)
