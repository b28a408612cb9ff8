"""rope in plain torch, one token at a time for the writes."""

import torch


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + half) of the last dimension. x: [..., head_dim]; cosines, sines: [..., head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def rope_and_write_kv(
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    num_kv_heads, block_size = key_cache.shape[1:3]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    cosines, sines = table[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2]
    queries, keys, values = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        key_cache[block, :, offset] = rotate(keys[token], cosines[token], sines[token])
        value_cache[block, :, offset] = values[token]
    queries.copy_(rotate(queries, cosines, sines))
