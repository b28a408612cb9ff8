"""How a batch is cut into the work of a GPU's programs, read off `cu_seqlens` and `context_lens` on the device.

A row is short when it has a few tokens at most: a decode, or a decode with the drafts it verifies. Its context is cut
into quanta, counted from position 0. All quanta of a batch lie on one line: row by row, in a row KV head by KV head, in
a head by position. Other rows, chunks of prompts, are cut into tiles of tokens. Nothing here comes from the host, so a
captured graph serves any lengths.

Knows lengths; not keys, nor what is done with a quantum. Numbers of quanta are int32, their products int64.
"""

import triton
import triton.language as tl


@triton.jit
def short_row(cu_seqlens, context_lens, row, num_rows, window, SHORT: tl.constexpr, QUANTUM: tl.constexpr):
    """(first quantum, how many) that the tokens of a row see, of a tensor of rows, too; (0, 0) unless it is short."""
    exists = row < num_rows
    tokens = tl.load(cu_seqlens + row + 1, mask=exists, other=0) - tl.load(cu_seqlens + row, mask=exists, other=0)
    context = tl.load(context_lens + row, mask=exists, other=0)
    is_short = (tokens > 0) & (tokens <= SHORT)
    first = tl.maximum(context - tokens + 1 - window, 0) // QUANTUM
    count = (context + QUANTUM - 1) // QUANTUM - first
    return tl.where(is_short, first, 0), tl.where(is_short, count, 0)


@triton.jit
def num_quanta(
    cu_seqlens, context_lens, num_rows, window, SHORT: tl.constexpr, QUANTUM: tl.constexpr, STEP: tl.constexpr
):
    """How many quanta one KV head has in all short rows before `num_rows`."""
    total = 0
    for start in range(0, num_rows, STEP):
        rows = start + tl.arange(0, STEP)
        _, counts = short_row(cu_seqlens, context_lens, rows, num_rows, window, SHORT, QUANTUM)
        total += tl.sum(counts)
    return total


@triton.jit
def find_row(
    place,
    cu_seqlens,
    context_lens,
    num_rows,
    window,
    KV_HEADS: tl.constexpr,
    SHORT: tl.constexpr,
    QUANTUM: tl.constexpr,
    STEP: tl.constexpr,
):
    """(row, quanta of one KV head before it): the row in which a place of the line lies."""
    row, before, seen = 0, 0, 0
    for start in range(0, num_rows, STEP):
        rows = start + tl.arange(0, STEP)
        _, counts = short_row(cu_seqlens, context_lens, rows, num_rows, window, SHORT, QUANTUM)
        passed = ((seen + tl.cumsum(counts)) * KV_HEADS <= place) & (rows < num_rows)
        row += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, counts, 0))
        seen += tl.sum(counts)
    return row, before


@triton.jit
def share_start(program, num_programs, total):
    """Where on a line of `total` quanta the share of a program begins; shares differ by one quantum at most."""
    return (program.to(tl.int64) * total // num_programs).to(tl.int32)


@triton.jit
def share_of(place, num_programs, total):
    """The program in whose share a place lies; the inverse of `share_start` for num_programs <= total."""
    return (((place + 1).to(tl.int64) * num_programs - 1) // total).to(tl.int32)


@triton.jit
def num_tiles(cu_seqlens, rows, num_rows, SHORT: tl.constexpr, TOKENS: tl.constexpr):
    """How many tiles of tokens rows have; short ones none."""
    exists = rows < num_rows
    tokens = tl.load(cu_seqlens + rows + 1, mask=exists, other=0) - tl.load(cu_seqlens + rows, mask=exists, other=0)
    return tl.where(tokens > SHORT, (tokens + TOKENS - 1) // TOKENS, 0)


@triton.jit
def find_tile(index, cu_seqlens, num_rows, SHORT: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr):
    """(row, tile in it) of the tile that comes `index` before the last one; row num_rows: there is no such tile.

    Backwards, because the last tiles of a chunk see most positions, and work that takes longest should start first.
    """
    row, before, total = 0, 0, 0
    for start in range(0, num_rows, STEP):
        total += tl.sum(num_tiles(cu_seqlens, start + tl.arange(0, STEP), num_rows, SHORT, TOKENS))
    place = total - 1 - index
    seen = 0
    for start in range(0, num_rows, STEP):
        rows = start + tl.arange(0, STEP)
        counts = num_tiles(cu_seqlens, rows, num_rows, SHORT, TOKENS)
        passed = (seen + tl.cumsum(counts) <= place) & (rows < num_rows)
        row += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, counts, 0))
        seen += tl.sum(counts)
    return tl.where(place < 0, num_rows, row), place - before
