"""Quantised rows as a GGUF file stores them, taken apart into integers, scales and minima; nothing is rounded.

Knows the blocks of 32 weights of ggml's Q4_0, Q4_1 and Q8_0, as docs/gguf.md and ggml-common.h of the ggml project
define them. Refuses to know where kernels put the integers.
"""

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline_executor.weights.grouped_rows import GroupedRows

BLOCK = 32


def take_apart(rows: npt.NDArray[np.uint8], stored: GGMLQuantizationType) -> GroupedRows | None:
    """rows: [rows, bytes per row]. Returns None for types that are not integers in groups of 32."""
    if stored not in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        return None
    blocks = rows.reshape(rows.shape[0], -1, GGML_QUANT_SIZES[stored][1])  # [rows, blocks, bytes]
    scales = _halves(blocks[:, :, :2])
    if stored == GGMLQuantizationType.Q8_0:
        integers = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
        return GroupedRows(8, integers.reshape(rows.shape[0], -1), scales, BLOCK)
    if stored == GGMLQuantizationType.Q4_0:
        return GroupedRows(4, _nibbles(blocks[:, :, 2:]), scales, BLOCK, minima=-8 * scales)
    return GroupedRows(4, _nibbles(blocks[:, :, 4:]), scales, BLOCK, minima=_halves(blocks[:, :, 2:4]))


def _halves(columns: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(columns).view(np.float16)[:, :, 0].astype(np.float32)


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The low halves of 16 bytes are the first 16 weights of a block."""
    low, high = np.bitwise_and(packed, 15), np.right_shift(packed, 4)
    return np.concatenate((low, high), axis=2, dtype=np.uint8).reshape(packed.shape[0], -1)
