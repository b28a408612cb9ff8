"""Operations that read every number once and write every result once, at the sizes of Llama-3-8B.

Norms, rotation with the write of keys and values, gates, rows of a table, copies of blocks.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch.nn import functional

from gpu_kernels.case import (
    Case,
    Place,
    Scale,
    Way,
    Work,
    compared,
    error_of,
    mismatch_of,
    moved,
    stored_numbers,
    type_name,
)
from paceline_kernels.activation import Gate
from paceline_kernels.activation import reference as activation_reference
from paceline_kernels.activation.triton import gate_and_multiply
from paceline_kernels.block_copy import reference as block_copy_reference
from paceline_kernels.block_copy.triton import block_copy
from paceline_kernels.rms_norm import reference as rms_norm_reference
from paceline_kernels.rms_norm.triton import rms_norm, rms_norm_heads
from paceline_kernels.rope import HeadNorms, rope_frequencies, rope_table
from paceline_kernels.rope import reference as rope_reference
from paceline_kernels.rope.triton import rope_and_write_kv
from paceline_kernels.take_rows import reference as take_rows_reference
from paceline_kernels.take_rows.triton import take_rows

_EPS = 1e-5
_TABLE_BYTES = 4  # of a number
_FP8 = torch.float8_e4m3fn
_HOST = torch.device("cpu")
# A number keeps four bits, and in Triton's interpreter a little less; or it is one of 255 up to the largest.
_STORED_ERRORS = {_FP8: 0.1, torch.int8: 0.02}


def cases(scale: Scale, place: Place) -> Iterator[Case]:
    """Those of 4,096 tokens, which targets are about, and decodes."""
    if scale is Scale.ODD:
        yield from (norm_case(place, 3, 129, adds=adds) for adds in (True, False))
        for cache_type in _STORED_ERRORS:
            yield rope_case(place, 3, (3, 1, 32), 40, cache_type, block_size=8)
        yield rope_case(place, 3, (3, 1, 32), 40, place.dtype, _EPS, block_size=8)
        yield head_norms_case(place, 3, (3, 1, 32))
        yield gate_case(place, 3, 100)
        yield take_rows_case(place, 5, 63, 9)
        yield block_copy_case(place, 3, 2, 12, 63)
        return
    for num_tokens in (4096,) if scale is Scale.QUICK else (64, 4096):
        yield norm_case(place, num_tokens, 4096)
        yield from (rope_case(place, num_tokens, (32, 8, 128), 8192, cache_type) for cache_type in (place.dtype, _FP8))
        yield gate_case(place, num_tokens, 14_336)
    if scale is Scale.FULL:
        yield rope_case(place, 4096, (32, 8, 128), 8192, place.dtype, _EPS)
        yield head_norms_case(place, 4096, (32, 8, 128))
        yield take_rows_case(place, 4096, 4096, 128_256)
        yield block_copy_case(place, 64, 32, 512, 8 * 64 * 128)


def norm_case(place: Place, num_tokens: int, width: int, *, adds: bool = True) -> Case:
    """Of a sum, which is kept, or of x alone."""

    def build(seed: int) -> Work:
        x, residual = (place.normal(num_tokens, width, seed=seed + i) for i in range(2))
        weight = place.normal(width, seed=seed + 2)

        def error(way: Way) -> float:
            kept = residual.clone()
            ours = way(lambda: rms_norm(x, weight, _EPS, kept if adds else None))
            expected = rms_norm_reference.rms_norm(kept if adds else x, weight, _EPS)
            return error_of(ours, expected) + mismatch_of((kept, residual + x if adds else residual))

        def theirs() -> torch.Tensor:
            return functional.rms_norm(residual.add_(x) if adds else x, (width,), weight, _EPS)

        return Work(lambda: rms_norm(x, weight, _EPS, residual if adds else None), theirs, error)

    num_bytes = (4 if adds else 2) * num_tokens * width * place.dtype.itemsize
    shape = {"tokens": num_tokens, "width": width}
    return _moves(place, "add + norm" if adds else "norm", shape, num_bytes, build)


def head_norms_case(place: Place, num_tokens: int, heads: tuple[int, int, int]) -> Case:
    num_heads, num_kv_heads, head_dim = heads

    def build(seed: int) -> Work:
        qkv = place.normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, seed=seed)
        norms = _norms(place, head_dim, seed, _EPS)

        def ours(into: torch.Tensor) -> None:
            rms_norm_heads(into, norms.query_weight, norms.key_weight, num_kv_heads, _EPS)

        def error(way: Way) -> float:
            normalised, expected = qkv.clone(), _normalised(qkv, norms, num_kv_heads)
            way(lambda: ours(normalised))
            return error_of(normalised, expected)

        return Work(lambda: ours(qkv), None, error)

    num_bytes = 2 * num_tokens * (num_heads + num_kv_heads) * head_dim * place.dtype.itemsize
    return _moves(place, "head norms", {"tokens": num_tokens}, num_bytes, build)


def _norms(place: Place, head_dim: int, seed: int, eps: float) -> HeadNorms:
    return HeadNorms(place.normal(head_dim, seed=seed + 2), place.normal(head_dim, seed=seed + 3), eps)


def _normalised(qkv: torch.Tensor, norms: HeadNorms | None, num_kv_heads: int) -> torch.Tensor:
    """float32."""
    if norms is None:
        return qkv.float()
    return rms_norm_reference.rms_norm_heads(qkv, norms.query_weight, norms.key_weight, num_kv_heads, norms.eps)


def rope_case(
    place: Place,
    num_tokens: int,
    heads: tuple[int, int, int],
    num_slots: int,
    cache_type: torch.dtype,
    eps: float | None = None,  # of norms of heads, if there are any
    block_size: int = 64,
) -> Case:
    """A rotation, and the write of keys and values in a type of their own."""
    num_heads, num_kv_heads, head_dim = heads

    def build(seed: int) -> Work:
        qkv = place.normal(num_tokens, num_heads + 2 * num_kv_heads, head_dim, seed=seed)
        table = rope_table(num_slots, rope_frequencies(head_dim, 500_000.0)).to(place.device)
        positions = place.integers(num_slots, num_tokens, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        slots = torch.randperm(num_slots, generator=generator)[:num_tokens].to(place.device)
        shape = (num_slots // block_size, num_kv_heads, block_size, head_dim)
        keys, values = (place.normal(*shape, seed=seed + i, dtype=cache_type) for i in range(2))
        scales = None  # of float8 one per head, given; of int8 one per slot, written
        if cache_type in _STORED_ERRORS:
            scales = torch.full(shape[1:2] if cache_type == _FP8 else shape[:3], 0.75, device=place.device)
        norms = None if eps is None else _norms(place, head_dim, seed, eps)

        all_scales = [scales if cache_type == _FP8 or scales is None else scales.clone() for _ in range(2)]

        def ours(into: torch.Tensor) -> None:
            rope_and_write_kv(into, table, positions, slots, keys, values, norms, *all_scales)

        def error(way: Way) -> float:
            rotated = qkv.clone()
            way(lambda: ours(rotated))
            wide, stored = _normalised(qkv, norms, num_kv_heads).cpu(), [torch.zeros(shape) for _ in range(2)]
            rope_reference.rope_and_write_kv(wide, table.cpu(), positions.cpu(), slots.cpu(), *stored)
            places = (slots.cpu() // block_size, slice(None), slots.cpu() % block_size)
            caches = zip((keys, values), all_scales, strict=True)
            written = [stored_numbers(cache.cpu(), moved(own, _HOST), slice(None))[places] for cache, own in caches]
            queries = error_of(rotated[:, :num_heads].cpu(), wide[:, :num_heads])
            loss = place.rounding / _STORED_ERRORS[cache_type] if cache_type in _STORED_ERRORS else 1.0
            return max(queries, *(loss * error_of(a, b[places]) for a, b in zip(written, stored, strict=True)))

        return Work(lambda: ours(qkv), None, error)

    # The table and queries are read, queries written, keys and values read in one type and written in the other.
    token_bytes = (2 * num_heads + 2 * num_kv_heads) * place.dtype.itemsize + 2 * num_kv_heads * cache_type.itemsize
    num_bytes = num_tokens * head_dim * (token_bytes + _TABLE_BYTES)
    op = "rope + kv" if eps is None else "norms + rope + kv"
    return _moves(place, op, {"tokens": num_tokens, "kv": type_name(cache_type)}, num_bytes, build)


def gate_case(place: Place, num_tokens: int, width: int, gate: Gate = Gate.SILU) -> Case:

    def build(seed: int) -> Work:
        gate_up = place.normal(num_tokens, 2 * width, seed=seed)
        gates, up = gate_up.chunk(2, dim=1)

        return compared(
            lambda: gate_and_multiply(gate_up, gate),
            lambda: activation_reference.gate_and_multiply(gate_up.float(), gate),
            lambda: functional.silu(gates) * up,
        )

    num_bytes = 3 * num_tokens * width * place.dtype.itemsize
    return _moves(place, "silu", {"tokens": num_tokens, "width": width}, num_bytes, build)


def take_rows_case(place: Place, count: int, width: int, num_rows: int) -> Case:

    def build(seed: int) -> Work:
        table, indices = place.normal(num_rows, width, seed=seed), place.integers(num_rows, count, seed=seed)

        return compared(
            lambda: take_rows(table, indices, 1.0),
            lambda: take_rows_reference.take_rows(table, indices),
            lambda: functional.embedding(indices, table),
            by=lambda *pair: mismatch_of(pair),
        )

    num_bytes = 2 * count * width * place.dtype.itemsize
    return _moves(place, "take rows", {"rows": count, "width": width}, num_bytes, build)


def block_copy_case(place: Place, count: int, num_layers: int, num_blocks: int, block: int) -> Case:

    def build(seed: int) -> Work:
        cache = place.normal(num_layers, num_blocks, block, seed=seed)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).int()
        sources, destinations = order[:count].clone(), order[count : 2 * count].clone()
        blocks = [ids.to(place.device) for ids in (sources, destinations)]
        indices = [ids.long() for ids in blocks]

        def error(way: Way) -> float:
            expected = cache.clone()
            block_copy_reference.block_copy(expected, sources, destinations)
            way(lambda: block_copy(cache, *blocks))
            return mismatch_of((cache, expected))

        def theirs() -> None:
            cache[:, indices[1]] = cache[:, indices[0]]

        return Work(lambda: block_copy(cache, *blocks), theirs, error)

    num_bytes = 2 * count * num_layers * block * place.dtype.itemsize
    shape = {"blocks": count, "layers": num_layers}
    return _moves(place, "block copy", shape, num_bytes, build)


def _moves(place: Place, op: str, shape: Mapping[str, int | str], num_bytes: int, build: Callable[[int], Work]) -> Case:
    return Case(op, shape, build, num_bytes=num_bytes, allowed_error=place.rounding)
