"""attention in plain torch, in float64: gathers the row's slots, then the textbook formula, one token at a time."""

import torch


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
    """See `paceline_kernels.attention.paged_attention`; rounded to float32 once, at the end."""
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    group = query.shape[1] // key_cache.shape[1]
    for row, context_len in enumerate(context_lens.tolist()):
        keys = _gather(key_cache, block_tables[row], context_len, group)
        values = _gather(value_cache, block_tables[row], context_len, group)
        start, stop = int(cu_seqlens[row]), int(cu_seqlens[row + 1])
        for token in range(start, stop):
            visible = context_len - (stop - 1 - token)
            seen = slice(0 if window is None else max(0, visible - window), visible)
            scores = torch.einsum("hd,hpd->hp", query[token].double(), keys[:, seen]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[token] = torch.einsum("hp,hpd->hd", scores.softmax(-1), values[:, seen]).float()
    return out


def _gather(cache: torch.Tensor, table: torch.Tensor, context_len: int, group: int) -> torch.Tensor:
    """The row's keys or values, once per query head: [num_heads, context_len, head_dim] float64."""
    num_blocks = -(-context_len // cache.shape[2])
    blocks = cache[table[:num_blocks].long()]  # [blocks, num_kv_heads, block_size, head_dim]
    flat = blocks.transpose(0, 1).flatten(1, 2)[:, :context_len]
    return flat.double().repeat_interleave(group, dim=0)
