"""attention: causal self-attention of one flat batch over KV blocks, read where they lie.

Knows blocks, slots and heads; not requests, and not whether a row is a chunk of a prompt or a decode.

Tokens behind the last row's, as padding of a captured graph has, have no result; rows may have no tokens.

On a CPU all numbers are float32. Slots beyond a token's position are not read, nor do those before its window have a
part in its result. Batch-invariant: a token's result depends, bit for bit, on its query and on the keys and values up
to its position alone: not on chunks, batch mates, threads, or on which blocks hold them; it does depend on block_size
where 256 is no multiple of that.

On a GPU query is bfloat16 or float16, and the caches of the same type or quantised, with scales, as `rope_and_write_kv`
writes them; head_dim is a multiple of 8 up to 256, scale above 0. Slots beyond a row's context, and those that a window
hides from all its tokens, have no part in its result, and neither blocks of such slots alone nor their entries of the
table are read; another row's do not matter, but NaN in a later slot of a token's own row may reach it. Blocks whose
size is a multiple of 64 are the fastest where short rows are many, see `triton.launches`. Nothing is refused for what
lengths and tables hold, since finding it would mean waiting for the device; tokens of a row of context 0 have no
result. Rows of few tokens, decodes and those that verify drafts, share the GPU evenly; other rows are chunks, whose
bits depend neither on batch mates nor on where a chunk is cut. With Splits.EVEN a token in a short row and the same
token in a chunk may differ by rounding. With Splits.FIXED all rows are chunks: long contexts of few rows then leave
most of the GPU idle.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_caches, check_tensor, float_type
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.gpu.splits import Splits

__all__ = ["GOOD_SHORT_QUERIES", "Splits", "paged_attention"]

GOOD_SHORT_QUERIES = 32  # short_tokens times the query heads of a KV head; with more, up to 64, registers are spilled


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
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    splits: Splits = Splits.EVEN,
    short_tokens: int = 1,
    max_query_len: int | None = None,
) -> torch.Tensor:
    """softmax(scale * q · k) · v for every token over the slots of its row up to and including its own.

    window: how many slots a token sees, its own included, at least 1; None for all. softcap: above 0, scores become
    softcap * tanh(score / softcap); None leaves them as they are.

    query: [num_tokens, num_heads, head_dim]; a token's heads lie together, tokens may lie apart.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim]; num_kv_heads divides num_heads.
    block_tables: [num_rows, max_blocks_per_row] int32; position p of row i is block `block_tables[i, p // block_size]`,
    slot `p % block_size`. cu_seqlens: [num_rows + 1] int32; row i has the tokens cu_seqlens[i]:cu_seqlens[i + 1],
    the last of which is at position context_lens[i] - 1. context_lens: [num_rows] int32.
    Returns [num_tokens, num_heads, head_dim] of the query's type, new and contiguous.

    For GPUs: key_scales, value_scales: of quantised caches. splits: how rows of up to short_tokens tokens are divided,
    if they are.
    max_query_len: as many tokens as any row has at most, if the host knows; 1 for decodes alone spares a launch.

    Raises KernelArgumentError (also for float8_e4m3fn on a GPU without such arithmetic), UnsupportedDeviceError.
    """
    op = "paged_attention"
    dtype = float_type(op, "query", query)
    check_caches(op, dtype, query.shape[-1], (key_cache, key_scales), (value_cache, value_scales))
    rows = (block_tables, cu_seqlens, context_lens)
    _check_rows(op, query, key_cache.shape[1], *rows)
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0) or short_tokens < 1:
        problem = f"a window of {window}, a softcap of {softcap} or {short_tokens} short tokens leaves nothing"
        raise KernelArgumentError(op, problem)
    if is_cpu(query.device):
        from paceline_kernels.attention import cpu

        return cpu.paged_attention(query, key_cache, value_cache, *rows, scale, window, softcap)
    if gpu.has_kernels(query.device):
        from paceline_kernels.attention import triton

        keys_values, scales = (key_cache, value_cache), (key_scales, value_scales)
        lengths = (short_tokens, query.shape[0] if max_query_len is None else max_query_len)
        return triton.paged_attention(query, *keys_values, *rows, scale, window, softcap, *scales, splits, *lengths)
    raise UnsupportedDeviceError(op, query.device, gpu.DEVICES)


def _check_rows(
    op: str,
    query: torch.Tensor,
    num_kv_heads: int,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    num_rows, head_dim = context_lens.shape[0], query.shape[-1]
    check_tensor(op, "block_tables", block_tables, torch.int32, (num_rows, None))
    check_tensor(op, "cu_seqlens", cu_seqlens, torch.int32, (num_rows + 1,))
    check_tensor(op, "context_lens", context_lens, torch.int32, (num_rows,))
    if query.ndim != 3 or query.stride()[1:] != (head_dim, 1):
        raise KernelArgumentError(op, "query must be [num_tokens, num_heads, head_dim], heads contiguous")
    if query.shape[1] % num_kv_heads:
        raise KernelArgumentError(op, f"{query.shape[1]} heads are no multiple of {num_kv_heads} KV heads")
