"""rope: rotary position embedding of queries and keys, and the write of keys and values into their KV slots.

Knows positions and slots; not which request they belong to. Su et al., "RoFormer", 2021,
https://arxiv.org/abs/2104.09864, in the layout of Hugging Face: dimension i pairs with i + head_dim / 2.
"""

from dataclasses import dataclass

import numpy as np
import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_caches, check_tensor, float_type
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.rms_norm import rms_norm_heads


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """What query heads and key heads are normalised by before they are rotated, see `rms_norm_heads`."""

    query_weight: torch.Tensor  # [head_dim]
    key_weight: torch.Tensor  # [head_dim]
    eps: float


def rope_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """The angle per position of every pair of dimensions: [head_dim / 2] float32.

    That of pair i is theta**(-2 i / head_dim), computed in float32 in the order of Hugging Face.
    """
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def rope_table(num_positions: int, frequencies: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """The cosines, then the sines, of every position: [num_positions, head_dim] float32.

    frequencies: [head_dim / 2] float32, of every pair, times the position the angle. factor: of cosines and sines.
    """
    # numpy, because torch would share a table of this size out among threads of its own.
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies.numpy()
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    table *= np.float32(factor)
    return torch.from_numpy(table)


def rope_and_write_kv(
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    norms: HeadNorms | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Rotate the queries in place; write the rotated keys and the values to their slots.

    qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], queries, keys, values. Its keys and values are left as
    they are, but for keys where norms are given: what they hold afterwards is not said. table: [num_positions,
    head_dim] float32, see `rope_table`. positions: [num_tokens] int32, below num_positions. slot_mapping: [num_tokens]
    int64, block * block_size + slot, no two alike; or -1, as in padding, of which nothing is written. key_cache,
    value_cache: [num_blocks, num_kv_heads, block_size, head_dim]. All contiguous.

    On a CPU all numbers are float32. On a GPU qkv and the norms' weights are bfloat16 or float16, and the caches of the
    same type or quantised: of float8_e4m3fn, where key_scales and value_scales, [num_kv_heads] float32, say what stored
    numbers are to be multiplied with (too large ones are stored as the largest there is); or of int8, where those two,
    [num_blocks, num_kv_heads, block_size] float32, receive that of every slot. There a position or a slot out of range
    is no error, since finding it would mean waiting for the device: the first gives NaN, the second is not written.

    Batch-invariant: tokens do not influence each other. Raises KernelArgumentError (also for float8_e4m3fn on a GPU
    without such arithmetic), UnsupportedDeviceError.
    """
    op = "rope_and_write_kv"
    num_tokens, _, head_dim = qkv.shape
    dtype = float_type(op, "qkv", qkv)
    check_tensor(op, "qkv", qkv, dtype, (None, None, None))
    check_tensor(op, "table", table, torch.float32, (None, head_dim))
    check_tensor(op, "positions", positions, torch.int32, (num_tokens,))
    check_tensor(op, "slot_mapping", slot_mapping, torch.int64, (num_tokens,))
    check_caches(op, dtype, head_dim, (key_cache, key_scales), (value_cache, value_scales))
    if norms is not None:
        check_tensor(op, "query_weight", norms.query_weight, dtype, (head_dim,))
        check_tensor(op, "key_weight", norms.key_weight, dtype, (head_dim,))
    if head_dim % 2 or qkv.shape[1] <= 2 * key_cache.shape[1]:
        raise KernelArgumentError(op, f"qkv of shape {list(qkv.shape)} does not fit {key_cache.shape[1]} KV heads")
    if is_cpu(qkv.device):
        from paceline_kernels.rope import cpu

        if norms is not None:
            rms_norm_heads(qkv, norms.query_weight, norms.key_weight, key_cache.shape[1], norms.eps)
        cpu.rope_and_write_kv(qkv, table, positions, slot_mapping, key_cache, value_cache)
    elif gpu.has_kernels(qkv.device):
        from paceline_kernels.rope import triton

        caches = (key_cache, value_cache)
        triton.rope_and_write_kv(qkv, table, positions, slot_mapping, *caches, norms, key_scales, value_scales)
    else:
        raise UnsupportedDeviceError(op, qkv.device, gpu.DEVICES)
