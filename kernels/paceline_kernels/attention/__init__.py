"""attention: causal self-attention of one flat batch over KV blocks, read where they lie.

Knows blocks, slots and heads; not requests, and not whether a row is a chunk of a prompt or a decode.
"""

import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.attention import cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """softmax(scale * q · k) · v for every token over the slots of its row up to and including its own.

    window: how many slots a token sees, its own included, at least 1; None for all. softcap: above 0, scores become
    softcap * tanh(score / softcap); None leaves them as they are.

    query: [num_tokens, num_heads, head_dim] float32; a token's heads lie together, tokens may lie apart.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim] float32; num_kv_heads divides num_heads.
    block_tables: [num_rows, max_blocks_per_row] int32; position p of row i is block `block_tables[i, p // block_size]`,
    slot `p % block_size`. cu_seqlens: [num_rows + 1] int32; row i has the tokens cu_seqlens[i]:cu_seqlens[i + 1], at
    least one, and the last of them is at position context_lens[i] - 1. context_lens: [num_rows] int32.
    Returns [num_tokens, num_heads, head_dim] float32, new and contiguous. Slots beyond a token's position are not read,
    nor do those before its window have a part in its result.
    Batch-invariant: a token's result depends, bit for bit, on its query and on the keys and values up to its position
    alone: not on chunks, batch mates, threads, or on which blocks hold them; it does depend on block_size where 256 is
    no multiple of that.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op = "paged_attention"
    num_rows, head_dim = context_lens.shape[0], query.shape[-1]
    check_tensor(op, "key_cache", key_cache, torch.float32, (None, None, None, head_dim))
    check_tensor(op, "value_cache", value_cache, torch.float32, tuple(key_cache.shape))
    check_tensor(op, "block_tables", block_tables, torch.int32, (num_rows, None))
    check_tensor(op, "cu_seqlens", cu_seqlens, torch.int32, (num_rows + 1,))
    check_tensor(op, "context_lens", context_lens, torch.int32, (num_rows,))
    if query.dtype != torch.float32 or query.ndim != 3 or query.stride()[1:] != (head_dim, 1):
        raise KernelArgumentError(op, "query must be float32 [num_tokens, num_heads, head_dim], heads contiguous")
    if query.shape[1] % key_cache.shape[1]:
        raise KernelArgumentError(op, f"{query.shape[1]} heads are no multiple of {key_cache.shape[1]} KV heads")
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        raise KernelArgumentError(op, f"a window of {window} or a softcap of {softcap} leaves nothing")
    if query.device.type == "cpu":
        rows = (block_tables, cu_seqlens, context_lens)
        return cpu.paged_attention(query, key_cache, value_cache, *rows, scale, window, softcap)
    raise UnsupportedDeviceError(op, query.device)
