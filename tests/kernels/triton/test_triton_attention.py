"""paged_attention for GPUs: decodes and chunks, every type of cache, odd sizes, and nothing else touched."""

from dataclasses import replace

import pytest
import torch

from paceline_kernels.attention import Splits, reference
from paceline_kernels.attention import triton as attention
from paceline_kernels.attention.triton.launches import splits_launch
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.testing import paged_batch, random_context

# What rounding weights and results to the type costs, of values about 1.
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 2e-6}
# A decode in two tiles, a chunk that ends in the middle of a tile and of a block, and a short one.
ROWS = [(129, 128, 129), (100, 60, 100), (63, 60, 63)]


@pytest.fixture
def exact(device):
    """The type that shows mistakes best."""
    return torch.float32 if device.type == "cpu" else torch.float16


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    """So that every loop goes round more than once."""
    monkeypatch.setattr(attention, "ROW_STEP", 2)
    monkeypatch.setattr(attention, "FOLD_PARTS", 2)


def batch_of(rows, heads=(4, 2, 16), block_size=16, seed=0):
    """Random contexts, of which rows (length, start, stop) are computed."""
    made = [(random_context(length, *heads, seed=index), *span) for index, (length, *span) in enumerate(rows)]
    return paged_batch(made, block_size, seed)


def run(place, batch, dtype, *, rules=None, splits=Splits.EVEN, short_tokens=1, scales=(None, None), longest=None):
    """The kernels' result, on the CPU. A quantised cache stays what it is, others become `dtype`."""
    query, keys, values, *rows, scale = batch.arguments()
    if scales[0] is None:
        keys, values = keys.to(dtype), values.to(dtype)
    placed = [place(tensor) for tensor in (query.to(dtype), keys, values, *rows)]
    placed_scales = [None if given is None else place(given) for given in scales]
    rules = {"window": None, "softcap": None} | (rules or {})
    out = attention.paged_attention(
        *placed, scale, rules["window"], rules["softcap"], *placed_scales, splits, short_tokens, longest or len(query)
    )
    return out.cpu()


def expected_of(batch, dtype, rules=None):
    """What the reference makes of the same rounded numbers."""
    query, keys, values, *rest = batch.arguments()
    return reference.paged_attention(query.to(dtype), keys.to(dtype), values.to(dtype), *rest, **(rules or {}))


def assert_close(ours, expected, bound):
    """Equal but for the rounding."""
    torch.testing.assert_close(ours.float(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("heads", "block_size", "splits"),
    [
        ((4, 2, 16), 16, Splits.EVEN),
        ((4, 2, 16), 16, Splits.FIXED),
        ((3, 1, 104), 5, Splits.EVEN),
        ((2, 2, 136), 128, Splits.FIXED),
    ],
)
def test_decodes_and_chunks_in_one_batch_equal_the_reference(place, dtype, heads, block_size, splits):
    batch = batch_of(ROWS, heads, block_size)
    assert_close(run(place, batch, dtype, splits=splits), expected_of(batch, dtype), ROUNDING[dtype])


RULES = {"window": 50}, {"window": 1}, {"window": 70, "softcap": 0.5}


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_windows_and_caps_equal_the_reference(place, exact, rules):
    batch = batch_of(ROWS)
    expected = expected_of(batch, exact, rules)
    for table, (_, start, _) in zip(batch.block_tables, ROWS, strict=True):
        table[: max(0, start + 1 - rules["window"]) // 16] = -1
    assert_close(run(place, batch, exact, rules=rules), expected, ROUNDING[exact])


@pytest.mark.parametrize("multiprocessors", [1, 5])
@pytest.mark.parametrize("splits", Splits)
def test_any_number_of_programs_shares_uneven_contexts(place, exact, monkeypatch, multiprocessors, splits):
    """Fewer programs than contexts, and more than tiles; contexts from 1 to 400."""
    monkeypatch.setattr(attention, "_DEFAULT_MULTIPROCESSORS", multiprocessors)
    batch = batch_of([(length, length - 1, length) for length in (1, 400, 130, 2)], (2, 1, 8))
    assert_close(run(place, batch, exact, splits=splits), expected_of(batch, exact), ROUNDING[exact])


def int8(cache):
    """(integers, their scales); slots without a number have a scale without one."""
    scales = cache.abs().amax(-1) / 127
    return (cache / scales[..., None]).round().nan_to_num(99).to(torch.int8), scales


def test_int8_caches_are_multiplied_with_the_scale_of_every_slot(place, dtype):
    """Numbers of very different size: a wrong scale would show."""
    batch = batch_of(ROWS, (3, 1, 72))
    sizes = torch.exp(torch.randn(batch.key_cache.shape[:3], generator=torch.Generator().manual_seed(1)))
    (keys, key_scales), (values, value_scales) = int8(batch.key_cache), int8(batch.value_cache * sizes[..., None])
    stored = change(batch, keys, values)
    exact_batch = change(batch, keys * key_scales[..., None], values * value_scales[..., None])
    ours = run(place, stored, dtype, scales=(key_scales, value_scales))
    query, *rest = exact_batch.arguments()
    # Products of eight bits are made of float16, whatever the queries are.
    bound = 4 * max(ROUNDING[dtype], ROUNDING[torch.float16])
    assert_close(ours, reference.paged_attention(query.to(dtype), *rest), bound)


def test_fp8_caches_are_multiplied_with_the_scale_of_their_head(place, exact):
    """Wide bounds: the interpreter's conversions are coarse."""
    batch = batch_of(ROWS)
    keys, values = (c.to(torch.float8_e4m3fn) for c in (batch.key_cache, batch.value_cache))
    key_scales, value_scales = torch.tensor([0.5, 1.5]), torch.tensor([2.0, 0.7])
    exact_batch = change(batch, keys.float() * key_scales[:, None, None], values.float() * value_scales[:, None, None])
    ours = run(place, change(batch, keys, values), exact, scales=(key_scales, value_scales))
    query, *rest = exact_batch.arguments()
    assert_close(ours, reference.paged_attention(query.to(exact), *rest), 2e-2)


def change(batch, keys, values):
    """The batch with other caches."""
    return type(batch)(batch.query, keys, values, batch.block_tables, batch.cu_seqlens, batch.context_lens, batch.scale)


@pytest.mark.parametrize("splits", Splits)
def test_rows_with_drafts_are_decodes_too(place, exact, splits):
    batch = batch_of([(260, 254, 260), (130, 126, 130), (64, 63, 64)])
    ours = run(place, batch, exact, splits=splits, short_tokens=6, rules={"window": 128})
    assert_close(ours, expected_of(batch, exact, {"window": 128}), ROUNDING[exact])


@pytest.mark.usefixtures("_products_by_row")
def test_batch_mates_do_not_change_a_bit_at_fixed_splits(place, exact):
    contexts = [random_context(length, 4, 2, 16, seed=length) for length in (300, 40, 70)]
    decode, chunk, other = (contexts[0], 299, 300), (contexts[1], 0, 40), (contexts[2], 69, 70)
    together = run(place, paged_batch([other, decode, chunk], 16, 1), exact, splits=Splits.FIXED)
    alone = [run(place, paged_batch([row], 16, 2), exact, splits=Splits.FIXED) for row in (decode, chunk)]
    assert torch.equal(alone[0], together[1:2])
    assert torch.equal(alone[1], together[2:])


@pytest.mark.usefixtures("_products_by_row")
@pytest.mark.parametrize("short_tokens", [1, 4])
def test_whether_a_token_comes_alone_or_in_a_chunk_does_not_change_a_bit_at_fixed_splits(place, exact, short_tokens):
    context = random_context(300, 4, 2, 16, seed=0)
    chunk, *parts = (
        run(place, paged_batch([(context, *span)], 16), exact, splits=Splits.FIXED, short_tokens=short_tokens)
        for span in ((260, 300), (260, 299), (299, 300), (297, 300))
    )
    assert torch.equal(torch.cat(parts[:2]), chunk)
    assert torch.equal(parts[2], chunk[-3:])


@pytest.mark.usefixtures("_products_by_row")
@pytest.mark.parametrize("rules", [{}, {"window": 33}], ids=str)
def test_where_a_chunk_is_cut_does_not_change_a_bit(place, exact, rules):
    """At once, or in parts of 41 and 99 tokens."""
    context = random_context(140, 2, 1, 16, seed=0)
    whole, first, rest = (
        run(place, paged_batch([(context, *span)], 16), exact, rules=rules) for span in ((0, 140), (0, 41), (41, 140))
    )
    assert torch.equal(torch.cat([first, rest]), whole)


def test_a_row_of_nan_stays_alone(place, exact):
    contexts = [random_context(200, 4, 2, 16, seed=index) for index in range(3)]
    contexts[1].keys[3], contexts[1].values[3] = float("nan"), float("nan")
    ours = run(place, paged_batch([(context, 199, 200) for context in contexts], 16), exact)
    assert ours[1].isnan().all()
    assert not ours[::2].isnan().any()


def test_queries_may_lie_between_keys_and_values(place, exact):
    batch = batch_of(ROWS[:2])
    wide = torch.full((batch.query.shape[0], 9, 16), float("nan"))
    wide[:, :4] = batch.query
    arguments = [place(t.to(exact) if t.is_floating_point() else t) for t in (wide, *batch.arguments()[1:-1])]
    arguments[0] = arguments[0][:, :4]
    ours = attention.paged_attention(*arguments, batch.scale, None, None, None, None, Splits.EVEN, 1, len(arguments[0]))
    assert_close(ours.cpu(), expected_of(batch, exact), ROUNDING[exact])


@pytest.mark.parametrize("splits", Splits)
def test_rows_without_context_are_padding(place, exact, splits):
    """A captured graph has more rows than a step: they change nothing, and have no result."""
    batch = batch_of([(70, 69, 70), (9, 8, 9), (33, 32, 33)])
    batch.context_lens[1] = 0
    ours = run(place, batch, exact, splits=splits)
    batch.context_lens[1] = 9
    assert_close(ours[::2], expected_of(batch, exact)[::2], ROUNDING[exact])
    assert ours[1].isnan().all()


@pytest.mark.parametrize("short_tokens", [4, 1], ids=["short rows", "chunks"])
def test_padding_of_several_tokens_changes_nothing(place, exact, short_tokens):
    batch = batch_of([(70, 66, 70), (9, 5, 9)])
    batch.context_lens[1] = 0
    ours = run(place, batch, exact, short_tokens=short_tokens)
    batch.context_lens[1] = 9
    assert_close(ours[:4], expected_of(batch, exact)[:4], ROUNDING[exact])
    assert ours[4:].isnan().all()


@pytest.mark.parametrize(
    ("span", "splits", "short_tokens", "longest"),
    [
        ((9, 5, 9), Splits.EVEN, 1, None),
        ((9, 5, 9), Splits.EVEN, 4, 4),
        ((9, 5, 9), Splits.FIXED, 4, None),
        ((300, 299, 300), Splits.EVEN, 1, 1),
    ],
    ids=["a chunk", "a short row", "a short row at fixed splits", "a decode"],
)
def test_rows_without_tokens_are_padding_too(place, exact, span, splits, short_tokens, longest):
    """More rows than tokens, as when rows have ended that a plan still names."""
    batch = batch_of([span])
    expected = expected_of(batch, exact)
    for name, value in (("cu_seqlens", batch.cu_seqlens[-1]), ("context_lens", 7), ("block_tables", 0)):
        column = getattr(batch, name)
        padding = torch.full((6, *column.shape[1:]), int(value), dtype=column.dtype)
        batch = replace(batch, **{name: torch.cat([column, padding])})
    ours = run(place, batch, exact, splits=splits, short_tokens=short_tokens, longest=longest)
    assert_close(ours, expected, ROUNDING[exact])


@pytest.mark.parametrize(
    ("heads", "short_tokens", "problem"),
    [((1, 1, 264), 1, "264 dimensions"), ((1, 1, 12), 1, "12 dimensions"), ((9, 1, 8), 9, "9 tokens of 9 heads")],
)
def test_what_no_launch_table_has_is_refused(place, exact, heads, short_tokens, problem):
    with pytest.raises(KernelArgumentError, match=problem):
        run(place, batch_of([(2, 1, 2)], heads), exact, short_tokens=short_tokens)


@pytest.mark.parametrize(
    ("cache_type", "num_columns", "num_rows", "num_warps"),
    [
        (torch.float8_e4m3fn, 4, 8, 2),
        (torch.float8_e4m3fn, 16, 256, 2),
        (torch.float8_e4m3fn, 4, 7, 4),
        (torch.float8_e4m3fn, 20, 8, 4),
        (torch.int8, 4, 8, 4),
    ],
)
def test_programs_of_two_warps_are_for_what_they_were_measured_at(cache_type, num_columns, num_rows, num_warps):
    """Many rows of float8 with few columns."""
    place = (Architecture.SM_90, 128, 1)
    assert splits_launch(place, cache_type, num_columns, num_rows).num_warps == num_warps


def test_fp8_caches_are_refused_where_a_gpu_has_no_such_numbers(place, exact, monkeypatch):
    """An A100, say."""
    monkeypatch.setattr(architecture, "_current_capability", lambda: 80)
    batch = batch_of([(2, 1, 2)])
    stored = change(batch, *(c.to(torch.float8_e4m3fn) for c in (batch.key_cache, batch.value_cache)))
    with pytest.raises(KernelArgumentError, match="use int8"):
        run(place, stored, exact, scales=(torch.ones(2), torch.ones(2)))
