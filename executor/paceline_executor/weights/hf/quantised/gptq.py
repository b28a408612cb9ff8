"""GPTQ: 4 or 8 bits along the inputs of each output, as AutoGPTQ, GPTQModel and AutoRound write them.

`qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out], `g_idx` [in].
Weight = (code - zero) * scale of the group that g_idx says. In version 1 the zeros are stored as one less, taken off
whole words, so that a zero of 0 borrows from its neighbour; version 2 stores them as they are.
"""

import numpy as np

from paceline_executor.weights.grouped_rows import (
    CodeArray,
    Float32Array,
    GroupedRows,
    GroupedTensor,
    IntArray,
    StoredCodes,
)
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.quantised.parts import Parts, order_of, scales_of, unpack
from paceline_executor.weights.refusals import shown, unsupported
from paceline_executor.weights.stored_tensor import FloatType, GroupedType, StoredIntegers

_BITS = (4, 8)
_SIZES = (32, 64, 128, 256, 512, 1024)
_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
# The mean of trained weights is a small part of a step of 4 bits; one of a whole step says that zeros are off by one.
_OFF_BY_ONE = (0.75, 1.25)


class Gptq:
    """See `Format`. Which version a file is of is decided by the first matrix to which that matters."""

    def __init__(self, config: JsonFields) -> None:
        """Raises ModelCorruptError or UnsupportedModelError."""
        layout = config.text("checkpoint_format") or config.text("format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise unsupported(
                config.path, f"its weights are gptq in the layout {shown(layout)}; gptq, gptq_v2 are read"
            )
        self._bits = read_bits(config, "bits", "gptq", _BITS, default=4)
        self._group = group_size(config)
        self._is_ordered = bool(config.flag("desc_act"))
        self._may_be_symmetric = config.flag("sym") is not False
        self._key_says = 2 if layout == "gptq_v2" else 1
        self._version: int | None = None

    def __call__(self, parts: Parts) -> GroupedTensor:
        outputs, inputs = parts.shape
        parts.check_ends("gptq", "qweight", "qzeros", "scales", "g_idx")
        bits = parts.integers("qweight", "<i4", None, outputs).shape[0] * 32 // inputs
        if bits in (2, 3):
            raise unsupported(parts.path, f"{parts.module} is gptq of {bits} bits; 4 and 8 bits are read")
        bits = bits if bits in _BITS else 4
        words = parts.integers("qweight", "<i4", inputs * bits // 32, outputs)
        scales = parts.floats("scales", None, outputs)
        num_groups, group = scales.shape[0], min(self._group or inputs, inputs)
        if parts.has("g_idx") or self._is_ordered:
            parts.integers("g_idx", "<i4", inputs)
        elif num_groups != -(-inputs // group):
            raise parts.wrong("scales", f"has {num_groups} groups, and group_size {group} makes others of {inputs}")
        zeros: StoredIntegers | None = None
        if parts.has("qzeros") or not self._may_be_symmetric:
            zeros = parts.integers("qzeros", "<i4", num_groups, -(-outputs * bits // 32))

        def scaled(codes: CodeArray) -> GroupedRows:
            order, size = order_of(parts, "g_idx", num_groups, group) if parts.has("g_idx") else (None, group)
            if order is None and num_groups != -(-inputs // size):
                raise parts.wrong("scales", f"has {num_groups} groups, and group_size {size} makes others of {inputs}")
            of_input = np.arange(inputs) // size if order is None else order
            numbers = self._zeros(zeros, packed, of_input)
            # AutoRound writes scales below 0.
            return GroupedRows(bits, codes, scales_of(scales, may_be_negative=True).T, size, numbers, order=order)

        # Of matrices with a size of their own the numbers of groups tell it, mostly.
        size = next((size for size in (group, *_SIZES) if -(-inputs // size) == num_groups), group)
        packed = StoredCodes(words, bits, parts.shape, is_transposed=True)
        return parts.grouped(self._stored(bits, size, FloatType(scales.stored)), packed, scaled)

    def type(self) -> GroupedType:
        """Of matrices that have no settings of their own."""
        return self._stored(self._bits, self._group or 0, FloatType.BFLOAT16)

    def _stored(self, bits: int, group: int, scales: FloatType) -> GroupedType:
        zeros = not self._may_be_symmetric
        return GroupedType(
            f"gptq-int{bits}", bits, group=group, scales=scales, has_zeros=zeros, is_ordered=self._is_ordered
        )

    def _zeros(self, stored: StoredIntegers | None, codes: StoredCodes, of_input: IntArray) -> Float32Array:
        """[out, groups]."""
        bits, num_outputs, num_groups = codes.num_bits, codes.shape[0], int(of_input.max()) + 1
        middle = np.float32(2 ** (bits - 1))
        if stored is None:
            return np.broadcast_to(middle, (num_outputs, num_groups))
        words = stored.as_stored().view(np.uint32)
        as_stored = unpack(words, bits)[:, :num_outputs]
        if self._may_be_symmetric and (as_stored == as_stored[0, 0]).all():
            return np.broadcast_to(middle, (num_outputs, num_groups))  # whatever stands there, a dummy maybe
        versions = {1: unpack(words + _ONES[bits], bits)[:, :num_outputs], 2: as_stored}
        if self._version is None:
            sizes = np.bincount(of_input, minlength=num_groups)
            meant = versions[self._key_says]
            numbers = codes.read()
            off = numbers.mean(dtype=np.float64) - (sizes @ meant).sum(dtype=np.float64) / numbers.size
            is_off = bits == 4 and _OFF_BY_ONE[0] < abs(off) < _OFF_BY_ONE[1]
            is_other = is_off and (off < 0) == (self._key_says == 1)
            self._version = 3 - self._key_says if is_other else self._key_says
            import structlog  # the command line is read without it

            structlog.get_logger().info(
                "gptq_zeros",
                version=self._version,
                decided_by="weights" if is_other else "checkpoint_format",
                path=str(codes.part.source.path),
            )
        return versions[self._version].T.astype(np.float32)


def group_size(config: JsonFields) -> int | None:
    """None for whole rows. Raises ModelCorruptError."""
    if config.get("group_size") in (None, -1):
        return None
    return config.positive_integer("group_size", 1 << 24)


def read_bits(config: JsonFields, field: str, kind: str, known: tuple[int, ...], default: int | None = None) -> int:
    """Raises ModelCorruptError or UnsupportedModelError."""
    bits = config.positive_integer(field, 64, default)
    if bits not in known:
        few = " and ".join(map(str, known))
        raise unsupported(config.path, f"its weights are {kind} of {bits} bits; {few} bits are read")
    return bits
