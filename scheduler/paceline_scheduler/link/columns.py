"""Columns of the plan protocol: numpy arrays to little-endian bytes and back. Knows number types only."""

import numpy as np

from paceline_scheduler.core.request import Float32Array, Int32Array
from paceline_scheduler.errors import DivergenceError


def column_bytes(values: Int32Array) -> bytes:
    """Return a column as it travels."""
    return values.astype("<i4", copy=False).tobytes()


def column(data: bytes) -> Int32Array:
    """Return the values of a column, read-only."""
    if len(data) % 4:
        raise DivergenceError(f"a column of {len(data)} bytes does not hold int32 values")
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


def floats(data: bytes) -> Float32Array:
    """Return the values of a column of floats, read-only."""
    if len(data) % 4:
        raise DivergenceError(f"a column of {len(data)} bytes does not hold floats")
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)
