"""Short rows whose blocks are copied in bulk, by descriptors: against the reference and the kernel without."""

from dataclasses import replace

import pytest
import torch

from kernel_rig import paged_batch, random_context
from paceline_kernels.attention import Splits, reference
from paceline_kernels.attention import triton as attention
from paceline_kernels.attention.triton import launches
from paceline_kernels.attention.triton.launches import splits_launch
from paceline_kernels.gpu.architecture import Architecture

SAME, FP8, INT8 = None, torch.float8_e4m3fn, torch.int8  # what a cache is made of: the type of queries, or 8 bits
KINDS = pytest.mark.parametrize("kind", [SAME, FP8, INT8], ids=["as queries", "float8", "int8"])
# What rounding costs, of values about 1: products of 8 bits are made of float16, and the interpreter's conversions to
# and from float8 are coarse.
BOUNDS = {INT8: 8e-3, FP8: 2e-2}
ROUNDING = {torch.float16: 2e-3, torch.float32: 2e-6}
# Contexts that end inside of a block and at its end, and one slot alone.
ROWS = [(130, 1), (64, 1), (1, 1)]


@pytest.fixture(autouse=True)
def _few_programs(gpu, monkeypatch):
    """Two or three are interpreted."""
    monkeypatch.setattr(attention, "_DEFAULT_MULTIPROCESSORS", 1)


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """Which launches were chosen; all of them must have been in bulk."""
    made = []

    def noted(*arguments, **options):
        made.append(splits_launch(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(attention, "splits_launch", noted)
    yield made
    assert all(launch.bulk for launch in made)


def batch_of(rows, heads=(2, 1, 64), block_size=64):
    """Random contexts, of which rows (length, tokens) are the last tokens."""
    made = [
        (random_context(length, *heads, seed=index), length - tokens, length)
        for index, (length, tokens) in enumerate(rows)
    ]
    return paged_batch(made, block_size, 0)


def stored(batch, kind, dtype):
    """(the batch with caches of a kind, their scales, the batch with the numbers that they stand for)."""
    keys, values = batch.key_cache, batch.value_cache
    if kind is SAME:
        narrow = replace(batch, key_cache=keys.to(dtype), value_cache=values.to(dtype))
        return (
            narrow,
            (None, None),
            replace(batch, key_cache=keys.to(dtype).float(), value_cache=values.to(dtype).float()),
        )
    if kind == INT8:
        # Values of very different size: a wrong scale would show. Slots without a number have a scale without one.
        sizes = torch.exp(torch.randn(values.shape[:3], generator=torch.Generator().manual_seed(1)))
        scales = [cache.abs().amax(-1) / 127 for cache in (keys, values * sizes[..., None])]
        wide = [scale[..., None] for scale in scales]
        narrow = [
            (cache / scale).round().nan_to_num(99).to(INT8)
            for cache, scale in zip((keys, values * sizes[..., None]), wide, strict=True)
        ]
    else:
        num_heads = keys.shape[1]
        scales = [torch.linspace(0.5, 1.5, num_heads), torch.linspace(2.0, 0.7, num_heads)]
        wide = [scale[:, None, None] for scale in scales]
        narrow = [cache.to(FP8) for cache in (keys, values)]
    meant = [cache.float() * scale for cache, scale in zip(narrow, wide, strict=True)]
    return (
        replace(batch, key_cache=narrow[0], value_cache=narrow[1]),
        tuple(scales),
        replace(batch, key_cache=meant[0], value_cache=meant[1]),
    )


def run(place, batch, dtype, scales=(None, None), *, rules=None, short_tokens=1):
    """The kernels' result, on the CPU."""
    query, *rest, scale = batch.arguments()
    placed = [place(tensor) for tensor in (query.to(dtype), *rest)]
    rules = {"window": None, "softcap": None} | (rules or {})
    placed_scales = [None if given is None else place(given) for given in scales]
    lengths = (short_tokens, short_tokens)
    out = attention.paged_attention(*placed, scale, *rules.values(), *placed_scales, Splits.EVEN, *lengths)
    return out.cpu()


def assert_right(place, batch, kind, dtype, *, rules=None, short_tokens=1):
    """Equal to the reference but for the rounding."""
    narrow, scales, meant = stored(batch, kind, dtype)
    ours = run(place, narrow, dtype, scales, rules=rules, short_tokens=short_tokens)
    query, *rest = meant.arguments()
    expected = reference.paged_attention(query.to(dtype).float(), *rest, **(rules or {}))
    torch.testing.assert_close(ours.float(), expected, rtol=0, atol=BOUNDS.get(kind, ROUNDING[dtype]))


@KINDS
@pytest.mark.parametrize(
    "heads",
    [(3, 1, 64), *(pytest.param(h, marks=pytest.mark.slow) for h in ((6, 2, 64), (4, 1, 128), (8, 1, 256)))],
    ids=str,
)
def test_decodes_equal_the_reference(place, exact, kind, heads):
    """Slots behind a context hold NaN, or what stands for it."""
    assert_right(place, batch_of(ROWS, heads), kind, exact)


@pytest.mark.parametrize("kind", [SAME, pytest.param(INT8, marks=pytest.mark.slow)], ids=["as queries", "int8"])
def test_a_block_may_hold_several_tiles(place, exact, kind):
    assert_right(place, batch_of(ROWS, (2, 2, 64), 192), kind, exact)


RULES = {"window": 1, "softcap": None}, {"window": 100, "softcap": None}, {"window": 64, "softcap": 0.5}


@KINDS
@pytest.mark.parametrize("rules", [*(pytest.param(r, marks=pytest.mark.slow) for r in RULES[:2]), RULES[2]], ids=str)
def test_windows_and_caps_equal_the_reference(place, exact, kind, rules):
    """Of blocks before a window not even the entry in the table is read."""
    narrow, scales, meant = stored(batch_of(ROWS), kind, exact)
    for table, (length, _) in zip(narrow.block_tables, ROWS, strict=True):
        table[: max(0, length - rules["window"]) // 64] = -1
    ours = run(place, narrow, exact, scales, rules=rules)
    query, *rest = replace(meant, block_tables=batch_of(ROWS).block_tables).arguments()
    expected = reference.paged_attention(query.to(exact).float(), *rest, **rules)
    torch.testing.assert_close(ours.float(), expected, rtol=0, atol=BOUNDS.get(kind, ROUNDING[exact]))


@pytest.mark.parametrize(
    "kind",
    [SAME, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (FP8, INT8))],
    ids=["as queries", "float8", "int8"],
)
@pytest.mark.parametrize(
    "tokens", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 7)), 4], ids="{} tokens".format
)
def test_rows_with_drafts_equal_the_reference(place, exact, kind, tokens):
    """Of 4 query heads: 8, 16 and 28 columns; a row's tokens may lie on both sides of a border."""
    batch = batch_of([(66, tokens), (2, 1)], (4, 1, 64))
    assert_right(place, batch, kind, exact, short_tokens=tokens)


@pytest.mark.slow
@KINDS
def test_drafts_with_windows_and_caps_equal_the_reference(place, exact, kind):
    batch = batch_of([(65, 3), (300, 3), (66, 2), (3, 3)])
    assert_right(place, batch, kind, exact, rules={"window": 70, "softcap": 2.0}, short_tokens=3)


@pytest.mark.parametrize("multiprocessors", [1, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [SAME, pytest.param(FP8, marks=pytest.mark.slow)], ids=["as queries", "float8"])
def test_any_number_of_programs_shares_uneven_contexts(place, exact, monkeypatch, kind, multiprocessors):
    """Fewer programs than contexts, and more than tiles; contexts from 1 to 300."""
    monkeypatch.setattr(attention, "_DEFAULT_MULTIPROCESSORS", multiprocessors)
    assert_right(place, batch_of([(1, 1), (300, 1), (130, 1), (2, 1)], (2, 2, 64)), kind, exact)


@pytest.mark.parametrize("kind", [FP8, INT8], ids=["float8", "int8"])
@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (0.0, 1e-4)), 300.0])
def test_queries_of_any_size_are_split_in_two_parts(place, exact, kind, size):
    """One head of each row is zero; others are small, or so large that one position takes all the weight."""
    batch = batch_of([(70, 1)])
    batch.query[:, 1:] *= size
    assert_right(place, batch, kind, exact)


@pytest.mark.slow
@KINDS
def test_the_kernel_that_addresses_every_slot_says_the_same(place, exact, kind, monkeypatch, chosen):
    """Far closer than the reference is: both multiply the same rounded numbers."""
    narrow, scales, _ = stored(batch_of(ROWS), kind, exact)
    ours = run(place, narrow, exact, scales)
    monkeypatch.setattr(launches, "BULK_SPLITS", {})
    other = run(place, narrow, exact, scales)
    assert [launch.bulk for launch in chosen] == [True, False]
    chosen.clear()
    bound = BOUNDS.get(kind, ROUNDING[exact]) / (4 if kind == INT8 else 1)
    torch.testing.assert_close(ours.float(), other.float(), rtol=0, atol=bound)


@pytest.mark.parametrize(
    "kind", [SAME, pytest.param(FP8, marks=pytest.mark.slow), INT8], ids=["as queries", "float8", "int8"]
)
def test_a_row_of_nan_stays_alone(place, exact, kind, device):
    """Its block is another row's afterwards, which has not written over all of it."""
    narrow, scales, _ = stored(batch_of([(66, 1), (2, 1)]), kind, exact)
    clean = run(place, narrow, exact, scales)
    block = int(narrow.block_tables[0, 1])
    if kind == INT8:
        scales[0][block, :, 1], scales[1][block, :, 1] = float("nan"), float("nan")
    else:
        for cache in (narrow.key_cache, narrow.value_cache):
            bits = cache.view(torch.uint8) if kind == FP8 else cache
            bits[block, :, 1] = 0x7F if kind == FP8 else float("nan")
    spoilt = run(place, narrow, exact, scales)
    if kind != FP8 or device.type == "cuda":  # which the interpreter takes for a number
        assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1], clean[1])
    narrow.context_lens[0] = 65
    narrow.key_cache.view(torch.uint8)[block, :, 2:] = 0x7F
    assert not run(place, narrow, exact, scales).isnan().any()


def test_rows_without_tokens_or_context_are_padding(place, exact):
    batch = batch_of([(70, 1), (9, 1), (2, 1)])
    clean = run(place, *stored(batch, SAME, exact)[:1], exact)
    batch.context_lens[1] = 0
    for name, value in (("cu_seqlens", batch.cu_seqlens[-1]), ("context_lens", 7), ("block_tables", 0)):
        column = getattr(batch, name)
        padding = torch.full((3, *column.shape[1:]), int(value), dtype=column.dtype)
        batch = replace(batch, **{name: torch.cat([column, padding])})
    ours = run(place, *stored(batch, SAME, exact)[:1], exact)
    assert torch.equal(ours[::2], clean[::2])
    assert ours[1].isnan().all()


def cache_of(dtype=torch.bfloat16, block_size=64, head_dim=128):
    return torch.empty((1, 1, block_size, head_dim), dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("place_of", "cache", "num_columns", "capped", "bulk"),
    [
        ((Architecture.SM_90, 128), cache_of(), 4, False, True),
        ((Architecture.SM_90, 128), cache_of(FP8, 128), 8, False, True),
        ((Architecture.SM_90, 128), cache_of(INT8), 32, True, True),
        ((Architecture.SM_90, 128), cache_of(), 33, False, False),
        ((Architecture.SM_90, 128), cache_of(FP8, 32), 4, False, False),
        ((Architecture.SM_90, 128), cache_of(FP8, 96), 4, False, False),
        ((Architecture.SM_90, 128), cache_of(head_dim=96), 4, False, False),
        ((Architecture.SM_90, 256), cache_of(head_dim=256), 8, False, True),
        ((Architecture.SM_90, 256), cache_of(head_dim=256), 9, False, False),
        ((Architecture.SM_90, 256), cache_of(head_dim=256), 8, True, False),
        ((Architecture.SM_80, 128), cache_of(), 4, False, False),
    ],
)
def test_blocks_are_copied_in_bulk_where_tiles_registers_and_the_gpu_allow(place_of, cache, num_columns, capped, bulk):
    assert splits_launch(*place_of, cache, num_columns, capped=capped).bulk == bulk


@pytest.mark.parametrize(
    ("cache", "num_programs"), [(cache_of(), 2), (cache_of(FP8), 3), (cache_of(INT8), 4), (cache_of(head_dim=64), 4)]
)
def test_as_many_programs_share_a_multiprocessor_as_registers_and_memory_allow(cache, num_programs):
    assert splits_launch(Architecture.SM_90, cache.shape[-1], cache, 4, capped=False).programs == num_programs
