"""rope for CPUs: token by token, each head rotated on its way to where it is kept."""

import numba
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.errors import KernelArgumentError

_Float32Array = npt.NDArray[np.float32]

# From this many tokens on, the tokens are shared out among the threads.
_MIN_PARALLEL_TOKENS = 32


def rope_and_write_kv(
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    at, slots = positions.numpy(), slot_mapping.numpy()
    if at.size == 0:
        return
    if not (at.min() >= 0 and at.max() < table.shape[0]):
        raise KernelArgumentError("rope_and_write_kv", f"positions must be 0 to {table.shape[0] - 1}")
    num_slots = key_cache.shape[0] * key_cache.shape[2]
    if not (slots.min() >= -1 and slots.max() < num_slots):
        raise KernelArgumentError("rope_and_write_kv", f"slots must be 0 to {num_slots - 1}, or -1 for none")
    rotate_and_write(qkv.numpy(), table.numpy(), at, slots, key_cache.numpy(), value_cache.numpy())


@jit.compiled
def rotate(x: _Float32Array, angles: _Float32Array, out: _Float32Array) -> None:
    """out = x with pairs (i, i + half) rotated. All [head_dim]; out may be x."""
    half = x.shape[0] // 2
    for i in range(half):
        first, second = x[i], x[half + i]
        cosine, sine = angles[i], angles[half + i]
        out[i] = first * cosine - second * sine
        out[half + i] = second * cosine + first * sine


@jit.compiled
def _place_token(
    qkv: _Float32Array,
    angles: _Float32Array,
    block: int,
    offset: int,
    key_cache: _Float32Array,
    value_cache: _Float32Array,
) -> None:
    num_kv_heads = key_cache.shape[1]
    num_heads = qkv.shape[0] - 2 * num_kv_heads
    for head in range(num_heads):
        rotate(qkv[head], angles, qkv[head])
    if block < 0:  # padding
        return
    for head in range(num_kv_heads):
        rotate(qkv[num_heads + head], angles, key_cache[block, head, offset])
        value_cache[block, head, offset] = qkv[num_heads + num_kv_heads + head]


@jit.compiled_parallel
def rotate_and_write(
    qkv: _Float32Array,
    table: _Float32Array,
    positions: npt.NDArray[np.int32],
    slot_mapping: npt.NDArray[np.int64],
    key_cache: _Float32Array,
    value_cache: _Float32Array,
) -> None:
    """The operation on arrays; positions and slots were checked."""
    block_size = key_cache.shape[2]
    if qkv.shape[0] < _MIN_PARALLEL_TOKENS:
        for token in range(qkv.shape[0]):
            block, offset = slot_mapping[token] // block_size, slot_mapping[token] % block_size
            _place_token(qkv[token], table[positions[token]], block, offset, key_cache, value_cache)
    else:
        for token in numba.prange(qkv.shape[0]):
            block, offset = slot_mapping[token] // block_size, slot_mapping[token] % block_size
            _place_token(qkv[token], table[positions[token]], block, offset, key_cache, value_cache)
