"""paged_attention: right against float64, blind to what it must not see, and the same bits in any company."""

import pytest
import torch

from paceline_kernels.attention import paged_attention, reference
from paceline_kernels.compiler import jit
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.testing import paged_batch, random_context

GQA = (9, 3, 64)  # the default model's heads
ODD = (4, 2, 10)


def contexts(lengths, heads=ODD):
    """One random context per length."""
    return [random_context(length, *heads, seed=index) for index, length in enumerate(lengths)]


def attend_in_chunks(context, length, chunk, block_size, seed, rules=None):
    """The first `length` tokens of a context, computed chunk by chunk: [length, num_heads, head_dim]."""
    starts = range(0, length, chunk)
    batches = [paged_batch([(context, s, min(s + chunk, length))], block_size, seed + s) for s in starts]
    return torch.cat([paged_attention(*batch.arguments(), **(rules or {})) for batch in batches])


@pytest.mark.parametrize(
    ("rows", "heads", "block_size"),
    [
        ([(1, 0, 1)], (1, 1, 8), 16),
        ([(5, 4, 5), (7, 0, 7), (20, 17, 20)], GQA, 16),
        ([(300, 299, 300), (290, 250, 290), (600, 595, 600)], ODD, 16),
        ([(40, 23, 40)], (2, 2, 12), 5),
        ([(70, 0, 70), (63, 62, 63)], (6, 1, 33), 8),
        ([(30, 0, 30)], (100, 1, 4), 300),
    ],
)
def test_paged_attention_equals_the_reference(rows, heads, block_size):
    made = contexts([length for length, _, _ in rows], heads)
    batch = paged_batch([(c, start, stop) for c, (_, start, stop) in zip(made, rows, strict=True)], block_size)
    expected = reference.paged_attention(*batch.arguments())
    torch.testing.assert_close(paged_attention(*batch.arguments()), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("heads", [ODD, GQA])
def test_chunks_do_not_change_a_bit(heads, seed):
    """Token by token, in chunks of 7, of 16, or at once; the blocks lie elsewhere every time."""
    length = 300 + seed
    context = random_context(length, *heads, seed=seed)
    at_once = attend_in_chunks(context, length, length, 16, seed)
    for chunk in (1, 7, 16, 200):
        assert torch.equal(attend_in_chunks(context, length, chunk, 16, seed + 1), at_once), chunk


RULES = {"window": 50}, {"window": 1}, {"window": 300}, {"softcap": 1.5}, {"window": 270, "softcap": 0.5}
WINDOWS = pytest.mark.parametrize("rules", RULES, ids=str)


@WINDOWS
def test_windows_and_caps_equal_the_reference(rules):
    rows = [(300, 299, 300), (290, 0, 290), (600, 595, 600), (5, 4, 5)]
    made = contexts([length for length, _, _ in rows])
    batch = paged_batch([(c, start, stop) for c, (_, start, stop) in zip(made, rows, strict=True)], 16)
    expected = reference.paged_attention(*batch.arguments(), **rules)
    torch.testing.assert_close(paged_attention(*batch.arguments(), **rules), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 7, 200])
@WINDOWS
def test_chunks_do_not_change_a_bit_with_windows_and_caps(rules, chunk):
    context = random_context(300, *ODD, seed=3)
    at_once = attend_in_chunks(context, 300, 300, 16, 0, rules)
    assert torch.equal(attend_in_chunks(context, 300, chunk, 16, 1, rules), at_once)


@pytest.mark.parametrize("chunk", [1, 40])
def test_a_token_sees_nothing_before_its_window(chunk):
    context = random_context(40, *ODD, seed=0)
    whole = attend_in_chunks(context, 40, chunk, 16, 0, {"window": 7})
    context.keys[:21], context.values[:21] = float("nan"), float("nan")
    spoilt = attend_in_chunks(context, 40, chunk, 16, 0, {"window": 7})
    assert torch.equal(spoilt[27:], whole[27:])
    assert spoilt[:27].isnan().all()


def test_batch_mates_do_not_change_a_bit():
    first, second, third, fourth = contexts([530, 40, 300, 17])
    together = paged_attention(
        *paged_batch([(first, 529, 530), (second, 0, 40), (third, 290, 300), (fourth, 16, 17)], 16, 1).arguments()
    )
    assert torch.equal(paged_attention(*paged_batch([(first, 529, 530)], 16, 2).arguments()), together[:1])
    assert torch.equal(paged_attention(*paged_batch([(third, 290, 300)], 16, 3).arguments()), together[41:51])


def test_the_block_size_does_not_change_a_bit_where_it_divides_a_segment():
    """8, 16 and 64 positions per block."""
    context = random_context(300, *ODD, seed=0)
    outputs = [paged_attention(*paged_batch([(context, 280, 300)], size).arguments()) for size in (8, 16, 64)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.skipif(jit.max_threads() < 2, reason="one core")
def test_the_number_of_threads_does_not_change_a_bit(threads):
    """Threads share units out, never a sum."""
    first, second = contexts([600, 90])
    batch = paged_batch([(first, 599, 600), (second, 10, 90)], 16)
    one = paged_attention(*batch.arguments())
    threads(2)
    assert torch.equal(paged_attention(*batch.arguments()), one)


def test_a_token_sees_nothing_after_itself():
    context = random_context(40, *ODD, seed=0)
    whole = paged_attention(*paged_batch([(context, 0, 40)], 16).arguments())
    context.keys[21:], context.values[21:] = float("nan"), float("nan")
    batch = paged_batch([(context, 0, 40)], 16)
    assert torch.equal(paged_attention(*batch.arguments())[:21], whole[:21])


def test_a_row_of_nan_stays_alone():
    first, second = contexts([20, 20])
    clean = paged_attention(*paged_batch([(first, 19, 20), (second, 19, 20)], 16).arguments())
    first.keys[3] = float("nan")
    spoilt = paged_attention(*paged_batch([(first, 19, 20), (second, 19, 20)], 16).arguments())
    assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1], clean[1])


def test_queries_may_lie_between_keys_and_values():
    batch = paged_batch([(context, 0, 20) for context in contexts([20])], 16)
    wide = torch.full((20, 9, 10), float("nan"))
    wide[:, :4] = batch.query
    apart = paged_attention(wide[:, :4], *batch.arguments()[1:])
    assert torch.equal(apart, paged_attention(*batch.arguments()))


def test_padding_changes_no_bit():
    first, second = contexts([20, 25])
    query, keys, values, tables, _, _, scale = paged_batch([(first, 0, 20), (second, 24, 25)], 16).arguments()
    nothing = torch.full((1, tables.shape[1]), 99, dtype=torch.int32)
    padded = paged_attention(
        torch.cat((query, torch.full((3, *query.shape[1:]), float("nan")))),
        keys,
        values,
        torch.cat((nothing, tables[:1], nothing, tables[1:], nothing)),
        torch.tensor([0, 0, 20, 20, 21, 21], dtype=torch.int32),
        torch.tensor([0, 20, 1000, 25, 0], dtype=torch.int32),
        scale,
    )
    alone = paged_batch([(first, 0, 20), (second, 24, 25)], 16).arguments()
    assert torch.equal(padded[:21], paged_attention(*alone))


def change(batch, index, place, value):
    """The batch's arguments with one element of one tensor changed."""
    arguments = list(batch.arguments())
    arguments[index] = arguments[index].clone()
    arguments[index][place] = value
    return arguments


@pytest.mark.parametrize(
    ("index", "place", "value", "problem"),
    [
        (3, (1, 0), 99, "row 1"),  # a block that does not exist
        (3, (0, 1), -1, "row 0"),
        (5, 1, 99, "row 1"),  # a context longer than the block table
        (5, 0, 3, "row 0"),  # a context shorter than its chunk
        (4, 1, -1, "row 0"),  # a row of less than no tokens
        (4, 2, 31, "must run from 0 to 21"),
    ],
)
def test_what_would_read_out_of_bounds_is_refused(index, place, value, problem):
    first, second = contexts([20, 25])
    batch = paged_batch([(first, 0, 20), (second, 24, 25)], 16)
    with pytest.raises(KernelArgumentError, match=problem):
        paged_attention(*change(batch, index, place, value))


def test_heads_that_do_not_divide_are_refused():
    batch = paged_batch([(context, 0, 5) for context in contexts([5])], 16)
    with pytest.raises(KernelArgumentError, match="3 heads are no multiple of 2 KV heads"):
        paged_attention(batch.query[:, :3].contiguous(), *batch.arguments()[1:])


@pytest.mark.parametrize("rules", [{"window": 0}, {"softcap": 0.0}], ids=str)
def test_rules_that_leave_nothing_are_refused(rules):
    batch = paged_batch([(context, 0, 5) for context in contexts([5])], 16)
    with pytest.raises(KernelArgumentError, match="leaves nothing"):
        paged_attention(*batch.arguments(), **rules)
