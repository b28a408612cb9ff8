"""attention in plain torch, in float64: gathers the row's slots, then the textbook formula, one token at a time.

Over int8 keys and values the same, with what the contract rounds, segment by segment; `int8` says how they lie.
"""

import math

import torch

_MAX_WORD = 32767
_SEGMENT = 256


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
    """Rounded to float32 once, at the end."""
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


def paged_attention_int8(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The same over int8 caches [num_blocks, num_kv_heads, block_size, head_dim + 4], as the decoder computes it.

    For blocks of a size that divides 256.
    """
    out = torch.empty(query.shape, dtype=torch.float32)
    group = query.shape[1] // keys.shape[1]
    for row, context_len in enumerate(context_lens.tolist()):
        table = block_tables[row]
        slots = (int8_keys(keys).flatten(3), int8_values(values).flatten(2, 3))
        k, v = (_gather(part, table, context_len, group) for part in slots)
        k_scales, v_scales = (
            _gather(int8_scales(cache)[..., None], table, context_len, group)[..., 0] for cache in (keys, values)
        )
        start, stop = int(cu_seqlens[row]), int(cu_seqlens[row + 1])
        for token in range(start, stop):
            visible = context_len - (stop - 1 - token)
            scores = torch.einsum("hd,hpd->hp", _rounded(query[token].double()), k[:, :visible])
            scores *= scale * k_scales[:, :visible]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if window is not None:
                scores[:, : max(0, visible - window)] = -torch.inf
            out[token] = _weighted(scores, v_scales[:, :visible], v[:, :visible]).float()
    return out


def int8_keys(cache: torch.Tensor) -> torch.Tensor:
    """The bytes of an int8 cache of keys, [..., block_size, head_dim / 2, 2], in place."""
    block_size, head_dim = cache.shape[-2], cache.shape[-1] - 4
    return _bytes(cache, head_dim // 2, block_size, 2).transpose(-3, -2)


def int8_values(cache: torch.Tensor) -> torch.Tensor:
    """The bytes of an int8 cache of values, [..., block_size / 2, 2, head_dim], in place."""
    block_size, head_dim = cache.shape[-2], cache.shape[-1] - 4
    return _bytes(cache, block_size // 2, head_dim, 2).transpose(-2, -1)


def int8_scales(cache: torch.Tensor) -> torch.Tensor:
    """The scales of an int8 cache, [..., block_size] float32, in place."""
    block_size, head_dim = cache.shape[-2], cache.shape[-1] - 4
    return cache.flatten(-2)[..., block_size * head_dim :].view(torch.float32)


def _bytes(cache: torch.Tensor, *shape: int) -> torch.Tensor:
    """What comes before the scales, each block in this shape."""
    return cache.flatten(-2)[..., : math.prod(shape)].view(*cache.shape[:-2], *shape)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Each row of 16-bit multiples of its largest magnitude / 32767."""
    largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    return (x * (_MAX_WORD / largest)).round() * (largest / _MAX_WORD)


def _weighted(scores: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The values of the slots, [heads, positions, head_dim] integers, weighted by the softmax of the scores."""
    best = scores.amax(dim=-1, keepdim=True)
    sums, total = torch.zeros_like(best), torch.zeros_like(values[:, 0])
    for begin in range(0, scores.shape[1], _SEGMENT):
        here = slice(begin, begin + _SEGMENT)
        largest = scores[:, here].amax(dim=-1, keepdim=True)
        if largest.isinf().all():
            continue
        exponentials = (scores[:, here] - largest).exp()
        share = (largest - best).exp()
        sums += share * exponentials.sum(dim=-1, keepdim=True)
        total += share * torch.einsum("hp,hpd->hd", _rounded(exponentials * scales[:, here]), values[:, here])
    return total / sums


def _gather(cache: torch.Tensor, table: torch.Tensor, context_len: int, group: int) -> torch.Tensor:
    """The row's keys or values, once per query head: [num_heads, context_len, head_dim] float64."""
    num_blocks = -(-context_len // cache.shape[2])
    blocks = cache[table[:num_blocks].long()]  # [blocks, num_kv_heads, block_size, head_dim]
    flat = blocks.transpose(0, 1).flatten(1, 2)[:, :context_len]
    return flat.double().repeat_interleave(group, dim=0)
