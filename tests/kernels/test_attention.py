"""paged_attention: right against float64, blind to what it must not see, and the same bits in any company."""

from dataclasses import replace

import pytest
import torch

from kernel_rig import paged_batch, random_context
from kernel_rig.tensors import int32
from paceline_kernels.attention import Splits, paged_attention, reference
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.gpu import architecture

slow = pytest.mark.slow
HEADS = (4, 2, 16)
GQA = (9, 3, 64)  # the default model's heads
ODD = (4, 2, 10)  # for a CPU: on a GPU dimensions are a multiple of 8
# A decode in two tiles, a chunk that ends in the middle of a tile and of a block, and a short one.
ROWS = [(129, 128, 129), (100, 60, 100), (63, 60, 63)]
# Of several segments of a CPU.
LONG_ROWS = [(300, 299, 300), (290, 250, 290), (600, 595, 600)]
# What rounding weights and results to the type costs, of values about 1.
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 2e-6}
EVEN_AND_SLOWLY_FIXED = pytest.mark.parametrize("splits", [Splits.EVEN, pytest.param(Splits.FIXED, marks=slow)])
PRODUCTS_BY_ROW = pytest.mark.usefixtures("_products_by_row")


@pytest.fixture(autouse=True)
def _small_segments(is_gpu, monkeypatch):
    """So that every loop of a GPU's kernels goes round more than once."""
    if is_gpu:
        monkeypatch.setattr("paceline_kernels.attention.triton.ROW_STEP", 2)
        monkeypatch.setattr("paceline_kernels.attention.triton.FOLD_PARTS", 2)


def contexts(lengths, heads=HEADS):
    """One random context per length."""
    return [random_context(length, *heads, seed=index) for index, length in enumerate(lengths)]


def batch_of(rows, heads=HEADS, block_size=16, seed=0):
    """Random contexts, of which rows (length, start, stop) are computed."""
    made = contexts([length for length, *_ in rows], heads)
    return paged_batch([(context, *span) for context, (_, *span) in zip(made, rows, strict=True)], block_size, seed)


def run(place, batch, dtype, *, scales=(None, None), **options):
    """The result, on the CPU. A quantised cache stays what it is, others become `dtype`."""
    query, keys, values, *rows, scale = batch.arguments()
    if scales[0] is None:
        keys, values = keys.to(dtype), values.to(dtype)
    placed = [place(tensor) for tensor in (query.to(dtype), keys, values, *rows)]
    key_scales, value_scales = (None if given is None else place(given) for given in scales)
    return paged_attention(*placed, scale, key_scales=key_scales, value_scales=value_scales, **options).cpu()


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
        (HEADS, 16, Splits.EVEN),
        (HEADS, 16, Splits.FIXED),
        ((3, 1, 104), 5, Splits.EVEN),
        pytest.param((2, 2, 136), 128, Splits.FIXED, marks=slow),
    ],
)
def test_decodes_and_chunks_in_one_batch_equal_the_reference(place, dtype, heads, block_size, splits):
    batch = batch_of(ROWS, heads, block_size)
    assert_close(run(place, batch, dtype, splits=splits), expected_of(batch, dtype), ROUNDING[dtype])


@pytest.mark.parametrize(
    ("rows", "heads", "block_size", "rules"),
    [
        ([(1, 0, 1)], (1, 1, 8), 16, {}),
        ([(5, 4, 5), (7, 0, 7), (20, 17, 20)], GQA, 16, {}),
        (LONG_ROWS, ODD, 16, {}),
        ([(40, 23, 40)], (2, 2, 12), 5, {}),
        ([(70, 0, 70), (63, 62, 63)], (6, 1, 33), 8, {}),
        ([(30, 0, 30)], (100, 1, 4), 300, {}),
        (LONG_ROWS, ODD, 16, {"window": 300}),
        ([*LONG_ROWS, (290, 0, 290), (5, 4, 5)], ODD, 16, {"window": 270, "softcap": 0.5}),
    ],
)
def test_on_a_cpu_contexts_and_heads_of_any_size_equal_the_reference(threads, rows, heads, block_size, rules):
    batch = batch_of(rows, heads, block_size)
    ours = paged_attention(*batch.arguments(), **rules)
    assert_close(ours, reference.paged_attention(*batch.arguments(), **rules), 2e-6)


@pytest.mark.parametrize(
    "rules",
    [
        {"window": 1},
        {"window": 70, "softcap": 0.5},
        *(pytest.param(rules, marks=slow) for rules in ({"window": 50}, {"softcap": 1.5})),
    ],
)
def test_windows_and_caps_equal_the_reference(place, backend, rules):
    batch, dtype = batch_of(ROWS), backend.dtype
    expected = expected_of(batch, dtype, rules)
    if backend.is_gpu and "window" in rules:  # it does not read the entries of what a window hides
        for table, (_, start, _) in zip(batch.block_tables, ROWS, strict=True):
            table[: max(0, start + 1 - rules["window"]) // 16] = -1
    assert_close(run(place, batch, dtype, **rules), expected, ROUNDING[dtype])


@pytest.mark.parametrize(
    ("multiprocessors", "splits"),
    [(1, Splits.EVEN), (5, Splits.EVEN), *(pytest.param(n, Splits.FIXED, marks=slow) for n in (1, 5))],
)
def test_any_number_of_programs_shares_uneven_contexts(gpu, place, exact, monkeypatch, multiprocessors, splits):
    """Fewer programs than contexts, and more than tiles; contexts from 1 to 400."""
    monkeypatch.setattr("paceline_kernels.attention.triton._DEFAULT_MULTIPROCESSORS", multiprocessors)
    batch = batch_of([(length, length - 1, length) for length in (1, 400, 130, 2)], (2, 1, 8))
    assert_close(run(place, batch, exact, splits=splits), expected_of(batch, exact), ROUNDING[exact])


def int8(cache):
    """(integers, their scales); slots without a number have a scale without one."""
    scales = cache.abs().amax(-1) / 127
    return (cache / scales[..., None]).round().nan_to_num(99).to(torch.int8), scales


def test_int8_caches_are_multiplied_with_the_scale_of_every_slot(gpu, place, dtype):
    """Numbers of very different size: a wrong scale would show."""
    batch = batch_of(ROWS[:2], (3, 1, 72))
    sizes = torch.exp(torch.randn(batch.key_cache.shape[:3], generator=torch.Generator().manual_seed(1)))
    (keys, key_scales), (values, value_scales) = int8(batch.key_cache), int8(batch.value_cache * sizes[..., None])
    exact_batch = change(batch, keys * key_scales[..., None], values * value_scales[..., None])
    ours = run(place, change(batch, keys, values), dtype, scales=(key_scales, value_scales))
    query, *rest = exact_batch.arguments()
    # Products of eight bits are made of float16, whatever the queries are.
    bound = 4 * max(ROUNDING[dtype], ROUNDING[torch.float16])
    assert_close(ours, reference.paged_attention(query.to(dtype), *rest), bound)


def test_fp8_caches_are_multiplied_with_the_scale_of_their_head(gpu, place, exact):
    """Wide bounds: the interpreter's conversions are coarse."""
    batch = batch_of([(70, 69, 70), (63, 60, 63)])
    keys, values = (c.to(torch.float8_e4m3fn) for c in (batch.key_cache, batch.value_cache))
    key_scales, value_scales = torch.tensor([0.5, 1.5]), torch.tensor([2.0, 0.7])
    exact_batch = change(batch, keys.float() * key_scales[:, None, None], values.float() * value_scales[:, None, None])
    ours = run(place, change(batch, keys, values), exact, scales=(key_scales, value_scales))
    query, *rest = exact_batch.arguments()
    assert_close(ours, reference.paged_attention(query.to(exact), *rest), 2e-2)


def change(batch, keys, values):
    """The batch with other caches."""
    return replace(batch, key_cache=keys, value_cache=values)


@EVEN_AND_SLOWLY_FIXED
def test_rows_with_drafts_are_decodes_too(gpu, place, exact, splits):
    batch = batch_of([(140, 134, 140), (30, 26, 30), (10, 9, 10)])
    ours = run(place, batch, exact, splits=splits, short_tokens=6, window=100)
    assert_close(ours, expected_of(batch, exact, {"window": 100}), ROUNDING[exact])


@PRODUCTS_BY_ROW
def test_batch_mates_do_not_change_a_bit_at_fixed_splits(place, exact):
    spans = [(69, 70), (299, 300), (0, 40), (279, 290)]
    rows = [(context, *span) for context, span in zip(contexts([stop for _, stop in spans]), spans, strict=True)]
    together = run(place, paged_batch(rows, 16, 1), exact, splits=Splits.FIXED)
    alone = [run(place, paged_batch([row], 16, 2), exact, splits=Splits.FIXED) for row in rows[1:]]
    assert torch.equal(torch.cat(alone), together[1:])


@PRODUCTS_BY_ROW
@pytest.mark.parametrize("short_tokens", [1, pytest.param(4, marks=slow)])
def test_whether_a_token_comes_alone_or_in_a_chunk_does_not_change_a_bit_at_fixed_splits(place, exact, short_tokens):
    context = random_context(300, *HEADS, seed=0)
    chunk, *parts = (
        run(place, paged_batch([(context, *span)], 16), exact, splits=Splits.FIXED, short_tokens=short_tokens)
        for span in ((260, 300), (260, 299), (299, 300), (297, 300))
    )
    assert torch.equal(torch.cat(parts[:2]), chunk)
    assert torch.equal(parts[2], chunk[-3:])


@PRODUCTS_BY_ROW
@pytest.mark.parametrize("rules", [{}, {"window": 33}], ids=str)
def test_where_a_chunk_is_cut_does_not_change_a_bit(place, exact, rules):
    """At once, or in parts of 41 and 99 tokens."""
    context = random_context(140, 2, 1, 16, seed=0)
    whole, first, rest = (
        run(place, paged_batch([(context, *span)], 16), exact, **rules) for span in ((0, 140), (0, 41), (41, 140))
    )
    assert torch.equal(torch.cat([first, rest]), whole)


def attend_in_chunks(context, chunk, seed, start=0, **rules):
    """A context computed from there on, chunk by chunk, on a CPU: [length - start, num_heads, head_dim]."""
    length = len(context.queries)
    starts = range(start, length, chunk)
    batches = [paged_batch([(context, s, min(s + chunk, length))], 16, seed + s) for s in starts]
    return torch.cat([paged_attention(*batch.arguments(), **rules) for batch in batches])


@pytest.mark.parametrize(
    ("heads", "rules"),
    [
        (ODD, {}),
        pytest.param(GQA, {}, marks=slow),
        pytest.param(ODD, {"window": 50}, marks=slow),
        *(pytest.param(ODD, rules, marks=slow) for rules in ({"softcap": 1.5}, {"window": 1}, {"window": 300})),
        (ODD, {"window": 270, "softcap": 0.5}),
    ],
)
def test_on_a_cpu_no_chunks_change_a_bit(threads, heads, rules):
    """Token by token behind a part, in chunks of 7, of 16, or at once; the blocks lie elsewhere every time."""
    context = random_context(301, *heads, seed=1)
    at_once = attend_in_chunks(context, 301, 0, **rules)
    for chunk, start in ((1, 240), (7, 0), (16, 0), (200, 0)):
        assert torch.equal(attend_in_chunks(context, chunk, 1, start, **rules), at_once[start:]), chunk


def test_on_a_cpu_the_block_size_does_not_change_a_bit_where_it_divides_a_segment(threads):
    """8, 16 and 64 positions per block."""
    context = random_context(300, *ODD, seed=0)
    outputs = [paged_attention(*paged_batch([(context, 280, 300)], size).arguments()) for size in (8, 16, 64)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_the_number_of_threads_does_not_change_a_bit(threads):
    """Threads share units out, never a sum."""
    batch = batch_of([(600, 599, 600), (90, 10, 90)], ODD)
    one = paged_attention(*batch.arguments())
    threads(2)
    assert torch.equal(paged_attention(*batch.arguments()), one)


@pytest.mark.parametrize("chunk", [1, 40])
def test_on_a_cpu_a_token_sees_nothing_before_its_window(threads, chunk):
    context = random_context(40, *ODD, seed=0)
    whole = attend_in_chunks(context, chunk, 0, window=7)
    context.keys[:21], context.values[:21] = float("nan"), float("nan")
    spoilt = attend_in_chunks(context, chunk, 0, window=7)
    assert torch.equal(spoilt[27:], whole[27:])
    assert spoilt[:27].isnan().all()


def test_on_a_cpu_a_token_sees_nothing_after_itself(threads):
    context = random_context(40, *ODD, seed=0)
    whole = attend_in_chunks(context, 40, 0)
    context.keys[21:], context.values[21:] = float("nan"), float("nan")
    assert torch.equal(attend_in_chunks(context, 40, 0)[:21], whole[:21])


def test_a_row_of_nan_stays_alone(place, exact):
    rows = [(context, 39, 40) for context in contexts([40] * 3)]
    expected = expected_of(paged_batch(rows, 16), exact)
    rows[1][0].keys[3], rows[1][0].values[3] = float("nan"), float("nan")
    ours = run(place, paged_batch(rows, 16), exact)
    assert ours[1].isnan().all()
    assert_close(ours[::2], expected[::2], ROUNDING[exact])


def test_queries_may_lie_between_keys_and_values(place, exact):
    batch = batch_of([(70, 69, 70), (30, 20, 30)])
    wide = torch.full((batch.query.shape[0], 9, 16), float("nan"))
    wide[:, :4] = batch.query
    arguments = [place(t.to(exact) if t.is_floating_point() else t) for t in (wide, *batch.arguments()[1:-1])]
    ours = paged_attention(arguments[0][:, :4], *arguments[1:], batch.scale)
    assert_close(ours.cpu(), expected_of(batch, exact), ROUNDING[exact])


@EVEN_AND_SLOWLY_FIXED
def test_on_a_gpu_rows_without_context_are_padding(gpu, place, exact, splits):
    """A captured graph has more rows than a step: they change nothing, and have no result."""
    batch = batch_of([(70, 69, 70), (9, 8, 9), (33, 32, 33)])
    ours = run(place, replace(batch, context_lens=int32(70, 0, 33)), exact, splits=splits)
    assert_close(ours[::2], expected_of(batch, exact)[::2], ROUNDING[exact])
    assert ours[1].isnan().all()


@pytest.mark.parametrize("short_tokens", [4, 1], ids=["short rows", "chunks"])
def test_on_a_gpu_padding_of_several_tokens_changes_nothing(gpu, place, exact, short_tokens):
    batch = batch_of([(70, 66, 70), (9, 5, 9)])
    ours = run(place, replace(batch, context_lens=int32(70, 0)), exact, short_tokens=short_tokens)
    assert_close(ours[:4], expected_of(batch, exact)[:4], ROUNDING[exact])
    assert ours[4:].isnan().all()


@pytest.mark.parametrize(
    ("span", "splits", "short_tokens", "longest"),
    [
        ((9, 5, 9), Splits.EVEN, 1, None),
        ((9, 5, 9), Splits.EVEN, 4, 4),
        ((150, 149, 150), Splits.EVEN, 1, 1),
        pytest.param((9, 5, 9), Splits.FIXED, 4, None, marks=slow),
    ],
    ids=["a chunk", "a short row", "a decode", "a short row at fixed splits"],
)
def test_rows_without_tokens_are_padding(place, exact, span, splits, short_tokens, longest):
    """More rows than tokens, as when rows have ended that a plan still names."""
    batch = batch_of([span])
    expected = expected_of(batch, exact)
    for name, value in (("cu_seqlens", batch.cu_seqlens[-1]), ("context_lens", 7), ("block_tables", 0)):
        column = getattr(batch, name)
        padding = torch.full((6, *column.shape[1:]), int(value), dtype=column.dtype)
        batch = replace(batch, **{name: torch.cat([column, padding])})
    ours = run(place, batch, exact, splits=splits, short_tokens=short_tokens, max_query_len=longest)
    assert_close(ours, expected, ROUNDING[exact])


def test_padding_before_between_and_behind_rows_changes_no_bit_at_fixed_splits(place, exact):
    """Rows without tokens have any table and length; tokens behind the last row have no result."""
    batch = batch_of([(20, 0, 20), (25, 24, 25)])
    tables, nothing = batch.block_tables, torch.full((1, batch.block_tables.shape[1]), 99, dtype=torch.int32)
    padded = replace(
        batch,
        query=torch.cat((batch.query, torch.full((3, *batch.query.shape[1:]), float("nan")))),
        block_tables=torch.cat((nothing, tables[:1], nothing, tables[1:], nothing)),
        cu_seqlens=int32(0, 0, 20, 20, 21, 21),
        context_lens=int32(0, 20, 1000, 25, 0),
    )
    ours, alone = (run(place, each, exact, splits=Splits.FIXED) for each in (padded, batch))
    assert torch.equal(ours[:21], alone)


@pytest.mark.parametrize(
    ("name", "at", "value", "problem"),
    [
        ("block_tables", (1, 0), 99, "row 1"),  # a block that does not exist
        ("block_tables", (0, 1), -1, "row 0"),
        ("context_lens", 1, 99, "row 1"),  # a context longer than the block table
        ("context_lens", 0, 3, "row 0"),  # a context shorter than its chunk
        ("cu_seqlens", 1, -1, "row 0"),  # a row of less than no tokens
        ("cu_seqlens", 2, 31, "must run from 0 to 21"),
    ],
)
def test_what_would_read_out_of_bounds_is_refused_on_a_cpu(name, at, value, problem):
    batch = batch_of([(20, 0, 20), (25, 24, 25)])
    getattr(batch, name)[at] = value
    with pytest.raises(KernelArgumentError, match=problem):
        paged_attention(*batch.arguments())


def test_heads_that_do_not_divide_are_refused():
    batch = batch_of([(5, 0, 5)])
    with pytest.raises(KernelArgumentError, match="3 heads are no multiple of 2 KV heads"):
        paged_attention(batch.query[:, :3].contiguous(), *batch.arguments()[1:])


@pytest.mark.parametrize("rules", [{"window": 0}, {"softcap": 0.0}, {"short_tokens": 0}], ids=str)
def test_rules_that_leave_nothing_are_refused(rules):
    with pytest.raises(KernelArgumentError, match="leaves nothing"):
        paged_attention(*batch_of([(5, 0, 5)]).arguments(), **rules)


@pytest.mark.parametrize(
    ("heads", "short_tokens", "problem"),
    [((1, 1, 264), 1, "264 dimensions"), ((1, 1, 12), 1, "12 dimensions"), ((9, 1, 8), 9, "9 tokens of 9 heads")],
)
def test_what_no_launch_table_has_is_refused(gpu, place, exact, heads, short_tokens, problem):
    with pytest.raises(KernelArgumentError, match=problem):
        run(place, batch_of([(2, 1, 2)], heads), exact, short_tokens=short_tokens)


def test_fp8_caches_are_refused_where_a_gpu_has_no_such_numbers(gpu, place, exact, monkeypatch):
    """An A100, say."""
    monkeypatch.setattr(architecture, "_current_capability", lambda: 80)
    batch = batch_of([(2, 1, 2)])
    stored = change(batch, *(c.to(torch.float8_e4m3fn) for c in (batch.key_cache, batch.value_cache)))
    with pytest.raises(KernelArgumentError, match="use int8"):
        run(place, stored, exact, scales=(torch.ones(2), torch.ones(2)))
