"""A checkpoint made of stored tensors, and what the stored numbers are as float32 or as integers in groups.

Dequantising blocks is the gguf library's. Refuses to know file formats and torch.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping

import numpy as np
from gguf import dequantize

from paceline_executor.errors import ModelCorruptError
from paceline_executor.weights.checkpoint import Float32Array, KvScales, ModelConfig
from paceline_executor.weights.grouped_rows import GroupedRows, GroupedTensor, Matrix
from paceline_executor.weights.quantized_rows import take_apart
from paceline_executor.weights.refusals import damaged
from paceline_executor.weights.stored_tensor import (
    ByteArray,
    FloatType,
    PlainType,
    StoredTensor,
    StoredType,
    block_sizes,
    first_bytes,
)

# Longer rows than the model's make fewer, larger groups.
_TARGET_ROW_ELEMENTS = 8192
_DIGESTED_BYTES = 4096  # of each tensor: a step of training changes all of them
_PLAIN = {FloatType.FLOAT32, FloatType.FLOAT16, FloatType.BFLOAT16}


class StoredCheckpoint:
    """Reads tensors on demand; holds no weight and no open file between calls."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Matrix], kv_scales: KvScales | None = None) -> None:
        """tensors: by Hugging Face name, at least those of `config.tensor_shapes()`, of those shapes."""
        self._config = config
        self._kv_scales = kv_scales
        self._tensors = {name: tensors[name] for name in config.tensor_shapes()}

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def quantization(self) -> str:
        sizes: Counter[StoredType] = Counter()
        for tensor in self._tensors.values():
            sizes[tensor.stored] += tensor.num_rows * tensor.row_numbers
        ((most_common, _),) = sizes.most_common(1)
        if isinstance(most_common, FloatType):
            return "" if most_common in _PLAIN else most_common.value
        return most_common.name

    @property
    def stored_types(self) -> Mapping[str, StoredType]:
        return {name: tensor.stored for name, tensor in self._tensors.items()}

    @property
    def digest(self) -> str:
        hashed = hashlib.blake2b(digest_size=16)
        for name, tensor in self._tensors.items():
            hashed.update(f"{name} {tensor.num_rows} {tensor.row_numbers} ".encode())
            part = tensor.codes.part if isinstance(tensor, GroupedTensor) else tensor
            hashed.update(first_bytes(part, _DIGESTED_BYTES))
        return hashed.hexdigest()

    @property
    def kv_scales(self) -> KvScales | None:
        return self._kv_scales

    def stored(self, name: str) -> Matrix:
        return self._tensors[name]

    def tensor(self, name: str) -> Float32Array:
        """Raises ModelCorruptError for values that are not finite."""
        return as_float32(self._tensors[name])

    def quantized(self, name: str) -> GroupedRows | None:
        """Raises ModelCorruptError for scales that are not finite."""
        return as_integers(self._tensors[name])


def as_float32(tensor: Matrix) -> Float32Array:
    """It is C-contiguous, rows in the order of the model.

    Nothing is rounded but codes times their scale. Raises ModelCorruptError for values that are not finite.
    """
    if isinstance(tensor, GroupedTensor):
        values = tensor.read().floats()
    else:
        values = floats_of(tensor.read(), tensor.stored).reshape(tensor.num_rows, -1)
        if tensor.scales is not None:
            with np.errstate(all="ignore"):  # whether the products are finite is asked below
                values *= as_float32(tensor.scales).reshape(-1, 1)
        values = _in_order(values, tensor)
    if not np.isfinite(values).all():
        raise not_finite(tensor)
    return np.ascontiguousarray(values).reshape(tensor.shape)


def as_integers(tensor: Matrix) -> GroupedRows | None:
    """As they are stored; None for floats, and for blocks that are not taken apart.

    Raises ModelCorruptError for scales and minima that are not finite.
    """
    if isinstance(tensor, GroupedTensor):
        return tensor.read()
    if isinstance(tensor.stored, FloatType):
        return None
    rows = take_apart(_in_order(tensor.read(), tensor), tensor.stored)
    if rows is not None and not np.isfinite(rows.scales).all():
        raise not_finite(tensor)
    if rows is not None and rows.minima is not None and not np.isfinite(rows.minima).all():
        raise not_finite(tensor)
    return rows


def not_finite(tensor: Matrix) -> ModelCorruptError:
    """A NaN or an infinity would answer every request with an error."""
    return damaged(tensor.source.path, f"tensor {tensor.name} holds values that are not finite")


def floats_of(data: ByteArray, stored: PlainType) -> Float32Array:
    """As float32, in some shape; a view of the bytes where they are float32."""
    match stored:
        case FloatType.BFLOAT16:  # the upper half of a float32
            words = data.view("<u2").astype(np.uint32)
            np.left_shift(words, 16, out=words)
            return words.view(np.float32)
        case FloatType.FLOAT8_E4M3FN:
            return FLOAT8_NUMBERS[data]
        case FloatType.FLOAT16:
            return data.view("<f2").astype(np.float32)
        case FloatType.FLOAT32:
            return data.view(np.float32)
    block_elements, block_bytes = block_sizes(stored)
    num_blocks = data.size // block_bytes
    blocks_per_row = max(1, _TARGET_ROW_ELEMENTS // block_elements)
    while num_blocks % blocks_per_row:
        blocks_per_row //= 2
    # Garbage in a damaged file overflows here; the caller looks at what came out.
    with np.errstate(all="ignore"):
        values = dequantize(data.reshape(-1, blocks_per_row * block_bytes), stored)
    return np.ascontiguousarray(values, np.float32)


def _in_order(rows: np.ndarray, tensor: StoredTensor) -> np.ndarray:
    """Rows of anything, [rows, …], out of the order of the file. They move whole, so those of blocks may, too."""
    if not tensor.interleaved_heads:
        return rows
    pairs = rows.reshape(tensor.interleaved_heads, -1, 2, rows.shape[1])  # [heads, head_dim / 2, 2, …]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _float8_numbers() -> Float32Array:
    """float8_e4m3fn: 4 bits of exponent, bias 7, 3 of mantissa; no infinity, two NaN."""
    bits = np.arange(256)
    exponents, mantissas = bits >> 3 & 15, bits & 7
    sizes = np.where(exponents > 0, (8 + mantissas) * 2.0 ** (exponents - 10), mantissas * 2.0**-9)
    sizes[(bits & 127) == 127] = np.nan
    return np.where(bits < 128, sizes, -sizes).astype(np.float32)


FLOAT8_NUMBERS = _float8_numbers()
