"""rope: rotary position embedding of queries and keys, and the write of keys and values into their KV slots.

Knows positions and slots; not which request they belong to. Su et al., "RoFormer", 2021,
https://arxiv.org/abs/2104.09864, in the layout of Hugging Face: dimension i pairs with i + head_dim / 2.
"""

import numpy as np
import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.rope import cpu


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
) -> None:
    """Rotate the queries in place; write the rotated keys and the values to their slots.

    qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim] float32, queries, keys, values. Its keys and values are
    left as they are. table: [num_positions, head_dim] float32, see `rope_table`. positions: [num_tokens] int32, below
    num_positions. slot_mapping: [num_tokens] int64, block * block_size + slot, no two alike.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim] float32. All contiguous.
    Batch-invariant: tokens do not influence each other. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op = "rope_and_write_kv"
    num_tokens, _, head_dim = qkv.shape
    check_tensor(op, "qkv", qkv, torch.float32, (None, None, None))
    check_tensor(op, "table", table, torch.float32, (None, head_dim))
    check_tensor(op, "positions", positions, torch.int32, (num_tokens,))
    check_tensor(op, "slot_mapping", slot_mapping, torch.int64, (num_tokens,))
    check_tensor(op, "key_cache", key_cache, torch.float32, (None, None, None, head_dim))
    check_tensor(op, "value_cache", value_cache, torch.float32, tuple(key_cache.shape))
    if head_dim % 2 or qkv.shape[1] <= 2 * key_cache.shape[1]:
        raise KernelArgumentError(op, f"qkv of shape {list(qkv.shape)} does not fit {key_cache.shape[1]} KV heads")
    if qkv.device.type == "cpu":
        cpu.rope_and_write_kv(qkv, table, positions, slot_mapping, key_cache, value_cache)
        return
    raise UnsupportedDeviceError(op, qkv.device)
