"""Quantised rows as a GGUF file stores them, taken apart into integers, scales and minima; nothing is rounded.

Knows the blocks of ggml's Q4_0, Q4_1 and Q8_0, of 32 weights, and Q4_K, of 256, as docs/gguf.md and ggml-common.h of
the ggml project define them. Refuses to know where kernels put the integers.
"""

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline_executor.weights.grouped_rows import GroupedRows

BLOCK = 32
_Q4_0, _Q4_1, _Q8_0, _Q4_K = (GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K"))


def take_apart(rows: npt.NDArray[np.uint8], stored: GGMLQuantizationType) -> GroupedRows | None:
    """rows: [rows, bytes per row]. Returns None for types that are not integers in groups of 32."""
    if stored not in (_Q4_0, _Q4_1, _Q8_0, _Q4_K):
        return None
    blocks = rows.reshape(rows.shape[0], -1, GGML_QUANT_SIZES[stored][1])  # [rows, blocks, bytes]
    scales = _halves(blocks[:, :, :2])
    if stored == _Q4_K:
        return _take_apart_q4_k(blocks)
    if stored == _Q8_0:
        integers = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
        return GroupedRows(8, integers.reshape(rows.shape[0], -1), scales, BLOCK)
    if stored == _Q4_0:
        return GroupedRows(4, _nibbles(blocks[:, :, 2:]), scales, BLOCK, minima=-8 * scales)
    return GroupedRows(4, _nibbles(blocks[:, :, 4:]), scales, BLOCK, minima=_halves(blocks[:, :, 2:4]))


def _take_apart_q4_k(blocks: npt.NDArray[np.uint8]) -> GroupedRows:
    """Each of eight groups of a block has 6 bits that its scale, and its minimum, are multiplied with."""
    packed, quads = blocks[:, :, 4:16], blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32)
    low, high = packed[:, :, :8] & 63, packed[:, :, :8] >> 6 << 4
    last = packed[:, :, 8:]
    factors = np.concatenate((low[:, :, :4], (last & 15) | high[:, :, :4]), axis=2)
    below = np.concatenate((low[:, :, 4:], (last >> 4) | high[:, :, 4:]), axis=2)
    scales, minima = (
        (_halves(blocks[:, :, at : at + 2])[:, :, None] * part).reshape(len(blocks), -1)
        for at, part in ((0, factors), (2, below))
    )
    codes = np.concatenate((quads & 15, quads >> 4), axis=3).reshape(len(blocks), -1)
    return GroupedRows(4, codes, scales, BLOCK, minima=-minima)


def _halves(columns: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(columns).view(np.float16)[:, :, 0].astype(np.float32)


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The low halves of 16 bytes are the first 16 weights of a block."""
    low, high = np.bitwise_and(packed, 15), np.right_shift(packed, 4)
    return np.concatenate((low, high), axis=2, dtype=np.uint8).reshape(packed.shape[0], -1)
