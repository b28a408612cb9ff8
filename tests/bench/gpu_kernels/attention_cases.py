"""Decodes and prompts of Llama-3-8B's attention: 32 query heads, 8 KV heads, 128 dimensions. Knows paged caches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn import functional

from gpu_kernels.anchors import AnchorKey, AnchorTable
from gpu_kernels.case import Bound, Case, Place, Scale, Way, Work, error_of, stored_numbers, type_name
from paceline_kernels.attention import Splits, reference
from paceline_kernels.attention.triton import paged_attention

_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_BLOCK_SIZE = 64
_FP8 = torch.float8_e4m3fn
_SCALE_BYTES = 4
_FP8_SCALE = 0.75  # no power of two, so that it shows
# Tokens of a batch, from the first to the last, that the reference computes, too.
_NUM_CHECKED = 4
# Products of fewer operations per byte than this wait for memory on all GPUs there is a launch table for.
_OPERATIONS_PER_BYTE = 200


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that compute the last of their tokens: one in a decode, all of them in a prompt."""

    contexts: Sequence[int]
    computed: Sequence[int]
    heads: tuple[int, int, int] = (_HEADS, _KV_HEADS, _HEAD_DIM)
    block_size: int = _BLOCK_SIZE
    splits: Splits = Splits.EVEN
    window: int | None = None
    softcap: float | None = None
    short_tokens: int = 1  # rows that compute so few decode, also where they verify drafts

    @property
    def is_prompt(self) -> bool:
        return self.computed == self.contexts

    @property
    def positions(self) -> list[tuple[int, int]]:
        """(row, position) of every token."""
        rows = enumerate(zip(self.contexts, self.computed, strict=True))
        return [(row, position) for row, (end, computed) in rows for position in range(end - computed, end)]

    def num_seen(self, position: int) -> int:
        return min(position + 1, self.window or position + 1)

    @property
    def num_blocks(self) -> list[int]:
        return [-(-context // self.block_size) for context in self.contexts]

    def num_bytes(self, place: Place, cache_type: torch.dtype) -> int:
        heads, kv_heads, head_dim = self.heads
        slot_bytes = head_dim * cache_type.itemsize + (_SCALE_BYTES if cache_type == torch.int8 else 0)
        rows = zip(self.contexts, self.computed, strict=True)
        num_read = sum(min(context, self.num_seen(context - 1) + computed - 1) for context, computed in rows)
        kv = 2 * num_read * kv_heads * slot_bytes
        return kv + 2 * sum(self.computed) * heads * head_dim * place.dtype.itemsize

    @property
    def num_flops(self) -> int:
        heads, _, head_dim = self.heads
        return 4 * sum(self.num_seen(position) for _, position in self.positions) * heads * head_dim


def _decode(contexts: Sequence[int]) -> Batch:
    return Batch(contexts, [1] * len(contexts))


def _prompt(context: int) -> Batch:
    return Batch([context], [context])


def _odd(batch: Batch, heads: tuple[int, int, int]) -> Batch:
    return replace(batch, heads=heads, block_size=16)


def cases(scale: Scale, place: Place) -> Iterator[Case]:
    """Decodes with all types of cache, even and uneven, then prompts."""
    if scale is Scale.ODD:
        heads = (4, 2, 64)
        for cache_type in (place.dtype, _FP8, torch.int8):
            yield attention_case("decode attention", _odd(_decode([129, 1]), heads), place, cache_type)
        fixed = replace(_odd(_decode([600, 1]), heads), splits=Splits.FIXED)
        yield attention_case("decode, fixed splits", fixed, place, place.dtype)
        yield attention_case("prefill attention", _odd(_prompt(48), heads), place, place.dtype)
        return
    shapes = [(8, 2048), (64, 2048), (8, 32_768), (64, 8192)]
    if scale is Scale.FULL:
        shapes += [(1, 512), (1, 32_768), (8, 8192), (64, 32_768), (128, 2048), (256, 512), (256, 1024), (256, 8192)]
    for num_rows, context in sorted(shapes):
        for cache_type in (place.dtype, _FP8):
            yield attention_case("decode attention", _decode([context] * num_rows), place, cache_type)
    for cache_type in (place.dtype, _FP8):
        fixed = replace(_decode([8192] * 64), splits=Splits.FIXED)
        yield attention_case("decode, fixed splits", fixed, place, cache_type)
    yield attention_case("decode attention", _decode([8192] * 64), place, torch.int8)
    for cache_type in (place.dtype, _FP8):
        # One long row among short ones, 4,096 on average.
        yield attention_case("decode attention", _decode([65_536 + 2048] + [2048] * 31), place, cache_type)
    for context in (2048, 8192):
        for cache_type in (place.dtype, _FP8):
            yield attention_case("prefill attention", _prompt(context), place, cache_type)


def cases_of_other_models(scale: Scale, place: Place) -> Iterator[Case]:
    """What Llama-3-8B does not ask for: other sizes of heads, windows, caps; and decodes beside a chunk of a prompt."""
    if scale is Scale.QUICK:
        return
    decode, prompt, mixed = _decode([8192] * 64), _prompt(8192), Batch([8192] * 64 + [4096], [1] * 64 + [512])
    all_heads = [(32, 8, 64), (32, 8, 256)]
    rules: list[tuple[int | None, float | None]] = [(1024, None), (None, 5.0)]
    if scale is Scale.ODD:
        all_heads, rules = [(1, 1, 40)], [(33, 5.0)]
        batches = (_decode([70]), _prompt(40), Batch([33, 40], [1, 20]))
        decode, prompt, mixed = (_odd(batch, all_heads[0]) for batch in batches)
    for heads in all_heads:
        yield attention_case("decode, other heads", replace(decode, heads=heads), place, place.dtype)
    for window, softcap in rules:
        yield attention_case("decode, rules", replace(decode, window=window, softcap=softcap), place, place.dtype)
        yield attention_case("prefill, rules", replace(prompt, window=window, softcap=softcap), place, place.dtype)
    yield attention_case("decodes + a chunk", mixed, place, place.dtype)


def attention_case(op: str, batch: Batch, place: Place, cache_type: torch.dtype) -> Case:
    kv = type_name(cache_type)
    is_even = len(set(batch.contexts)) == 1
    shape = {"b": len(batch.contexts), "ctx": max(batch.contexts) if is_even else "uneven", "kv": kv}
    if batch.heads[2] != _HEAD_DIM:
        shape["d"] = batch.heads[2]
    if batch.window:
        shape["window"] = batch.window
    if batch.softcap:
        shape["rule"] = "softcap"
    num_bytes, num_flops = batch.num_bytes(place, cache_type), batch.num_flops
    table = AnchorTable.PREFILL if batch.is_prompt else AnchorTable.DECODE
    sizes = (len(batch.contexts), batch.contexts[0], *batch.heads)
    is_anchored = is_even and not batch.window and not batch.softcap
    return Case(
        op=op,
        shape=shape,
        build=lambda seed: _build(batch, place, cache_type, seed),
        bound=Bound.PRODUCTS if num_flops > _OPERATIONS_PER_BYTE * num_bytes else Bound.MEMORY,
        num_bytes=num_bytes,
        num_flops=num_flops,
        allowed_error=2 * place.rounding,  # weights are rounded to the type, too
        anchor=AnchorKey(table, (kv,), sizes) if is_anchored else None,
    )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What attention is given, and what its scales are."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    scales: torch.Tensor | None
    batch: Batch

    def attend(self) -> torch.Tensor:
        scale = self.query.shape[-1] ** -0.5
        rows = (self.tables, self.cu_seqlens, self.context_lens)
        caches, scales = (self.keys, self.values), (self.scales, self.scales)
        rules, lengths = (self.batch.window, self.batch.softcap), (self.batch.short_tokens, max(self.batch.computed))
        return paged_attention(self.query, *caches, *rows, scale, *rules, *scales, self.batch.splits, *lengths)


def _build(batch: Batch, place: Place, cache_type: torch.dtype, seed: int) -> Work:
    heads, kv_heads, head_dim = batch.heads
    num_blocks = batch.num_blocks
    shape = (sum(num_blocks), kv_heads, batch.block_size, head_dim)
    if cache_type == torch.int8:
        caches = [place.integers(255, *shape, seed=seed + i, dtype=torch.uint8).view(torch.int8) for i in range(2)]
    else:
        caches = [place.normal(*shape, seed=seed + i, dtype=cache_type) for i in range(2)]
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(seed)).int()
    tables = torch.full((len(num_blocks), max(num_blocks)), -1, dtype=torch.int32)
    for row, end in enumerate(accumulate(num_blocks)):
        tables[row, : num_blocks[row]] = order[end - num_blocks[row] : end]
    inputs = _Inputs(
        query=place.normal(sum(batch.computed), heads, head_dim, seed=seed + 2),
        keys=caches[0],
        values=caches[1],
        tables=tables.to(place.device),
        cu_seqlens=torch.tensor([0, *accumulate(batch.computed)], dtype=torch.int32, device=place.device),
        context_lens=torch.tensor(batch.contexts, dtype=torch.int32, device=place.device),
        scales=_scales(place, shape, cache_type, seed),
        batch=batch,
    )
    return Work(inputs.attend, _theirs(batch, inputs), lambda way: _error(way, batch, inputs))


def _scales(place: Place, shape: Sequence[int], cache_type: torch.dtype, seed: int) -> torch.Tensor | None:
    """Of float8 one per head, of int8 one per slot, about a hundredth."""
    if cache_type == torch.int8:
        return 0.01 + 0.002 * place.normal(*shape[:3], seed=seed + 3, dtype=torch.float32).clamp(-3, 3)
    return torch.full((shape[1],), _FP8_SCALE, device=place.device) if cache_type == _FP8 else None


def _theirs(batch: Batch, inputs: _Inputs) -> Callable[[], object] | None:
    """torch's attention over keys and values that lie together: the same numbers of the same caches, in any order."""
    heads, kv_heads, head_dim = batch.heads
    context, num_rows = batch.contexts[0], len(batch.contexts)
    is_plain = inputs.scales is None and not batch.window and not batch.softcap
    if not is_plain or set(batch.contexts) != {context} or context % batch.block_size:
        return None
    keys, values = (cache.view(num_rows, kv_heads, context, head_dim) for cache in (inputs.keys, inputs.values))
    query = inputs.query.view(num_rows, -1, heads, head_dim).transpose(1, 2)
    is_causal = batch.is_prompt
    return lambda: functional.scaled_dot_product_attention(query, keys, values, is_causal=is_causal, enable_gqa=True)


def _error(way: Way, batch: Batch, inputs: _Inputs) -> float:
    """Of some tokens, each as a row of its own, with the blocks of its row and no others."""
    ours = way(inputs.attend)
    tokens = sorted({(len(ours) - 1) * index // _NUM_CHECKED for index in range(_NUM_CHECKED + 1)})
    expected = [_expected(batch, inputs, token) for token in tokens]
    return error_of(ours[tokens], torch.cat(expected))


def _expected(batch: Batch, inputs: _Inputs, token: int) -> torch.Tensor:
    row, position = batch.positions[token]
    visible = position + 1
    blocks = inputs.tables[row, : -(-visible // batch.block_size)].long()
    keys, values = (stored_numbers(cache, inputs.scales, blocks) for cache in (inputs.keys, inputs.values))
    own = torch.arange(len(blocks), dtype=torch.int32)[None]
    one = torch.tensor([0, 1], dtype=torch.int32)
    lens = torch.tensor([visible], dtype=torch.int32)
    query = inputs.query[token : token + 1]
    scale, rules = query.shape[-1] ** -0.5, (batch.window, batch.softcap)
    return reference.paged_attention(query, keys, values, own, one, lens, scale, window=rules[0], softcap=rules[1])
