"""sampling on a GPU, what follows the survey: a program per row finds the limit that filters set, and draws.

min_p and top_k are a limit that is known before the draw. top_p needs none: the loudest of all tokens is also the
loudest of those that top_p keeps, if it is one of them, which the mass before it says. Otherwise nothing from there on
is kept either, and the loudest of the rest is looked for: a row draws about 1 / top_p times, and nothing is sorted.

Knows the filters and their order; not the logits' rules.
"""

import triton
import triton.language as tl

from paceline_kernels.sampling.triton.noise import gumbel, random_words
from paceline_kernels.sampling.triton.segments import (
    comes_before,
    from_key,
    key_of_rank,
    list_segments,
    load_chunk,
    load_logits,
    load_scaled,
    mass_before,
)
from paceline_kernels.sampling.triton.survey import MIN_TEMPERATURE, SEGMENT, scale

# Of SampleOutcome.
_DRAWN, _NOT_FINITE, _NOTHING_LEFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# What a bound of the survey may be too low by, absolutely and relative to itself: more than all its roundings.
_SLACK, _RELATIVE_SLACK = tl.constexpr(1e-4), tl.constexpr(1e-6)


@triton.jit(do_not_specialize=["num_segments"])
def draw_kernel(
    logits,  # [rows, vocab], float32 or of 16 bits
    ruled,  # [rows, vocab] float32, or None
    is_ruled,  # [rows] int32: whether what is drawn from are these logits, or None
    temperatures,  # and what follows: [rows], see SamplingParameters
    top_ks,
    top_ps,
    min_ps,
    seeds,
    offsets,
    peaks,  # and the next two: [rows, num_segments] float32, what the survey found
    bounds,
    masses,
    listed,  # [rows, PADDED] int32, for the program's own use
    gathered,  # [rows, CAPACITY] int32, the same
    token_ids,  # [rows] int32, and the next
    outcomes,
    vocab,
    num_segments,
    PADDED: tl.constexpr,  # at least num_segments, a power of two
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """A program per row, the last one first: the survey read it last, so that it is in the cache."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    if ruled is not None:
        values = (logits + row * vocab, ruled + row * vocab, tl.load(is_ruled + row))
    else:
        values = (logits + row * vocab, None, None)
    segments = tl.arange(0, PADDED)
    surveyed = row * num_segments
    peak = tl.load(peaks + surveyed + segments, mask=segments < num_segments, other=float("-inf"))
    largest = tl.max(peak)
    temperature = tl.load(temperatures + row)
    token, outcome = tl.full([], 0, tl.int32), tl.full([], _DRAWN, tl.int32)
    if tl.max((peak != peak).to(tl.int32)) != 0:
        outcome = tl.full([], _NOT_FINITE, tl.int32)
    elif largest == float("-inf"):
        outcome = tl.full([], _NOTHING_LEFT, tl.int32)
    elif (temperature < MIN_TEMPERATURE) | (tl.abs(tl.div_rn(largest, temperature)) == float("inf")):
        token = _first_with(values, peak, largest, vocab)
    else:
        reciprocal = tl.div_rn(1.0, temperature)
        scaled_row = (values, temperature, reciprocal, vocab)
        scaled_peaks = scale(peak, temperature, reciprocal)
        listed += row * PADDED
        gathered += row * CAPACITY
        top_k, min_p = tl.load(top_ks + row), tl.load(min_ps + row)
        lowest = _limit(scaled_row, scaled_peaks, num_segments, listed, gathered, top_k, min_p, CHUNK, CAPACITY)
        token = _drawn(
            scaled_row,
            scaled_peaks,
            bounds + surveyed,
            masses + surveyed,
            listed,
            lowest,
            tl.load(top_ps + row),
            tl.load(seeds + row),
            tl.load(offsets + row),
            CHUNK,
        )
    tl.store(token_ids + row, token)
    tl.store(outcomes + row, outcome)


@triton.jit
def _first_with(values, peak, largest, vocab):
    """The lowest token that has the largest logit."""
    segments = tl.arange(0, peak.shape[0])
    segment = tl.min(tl.where(peak == largest, segments, peak.shape[0]))
    tokens = segment * SEGMENT + tl.arange(0, SEGMENT)
    logits = load_logits(values, tokens, tokens < vocab, float("-inf"))
    return tl.min(tl.where(logits == largest, tokens, vocab))


@triton.jit
def _limit(
    row, scaled_peaks, num_segments, listed, gathered, top_k, min_p, CHUNK: tl.constexpr, CAPACITY: tl.constexpr
):
    """The lowest scaled logit that min_p and top_k keep; -inf where neither is on. row: as in `segments`."""
    lowest = tl.full([], float("-inf"), tl.float32)
    if min_p > 0.0:
        lowest = tl.max(scaled_peaks) + tl.log(min_p)
    if (top_k > 0) & (top_k < row[3]):
        key = key_of_rank(row, scaled_peaks, num_segments, listed, gathered, top_k, CHUNK, CAPACITY)
        lowest = tl.maximum(lowest, from_key(key))
    return lowest


@triton.jit
def _drawn(row, scaled_peaks, bounds, masses, listed, lowest, top_p, seed, offset, CHUNK: tl.constexpr):
    """The loudest of the tokens from `lowest` on that top_p keeps."""
    values, temperature, reciprocal, vocab = row
    segments = tl.arange(0, scaled_peaks.shape[0])
    is_left = scaled_peaks > float("-inf")
    bound = tl.load(bounds + segments, mask=is_left, other=0.0) * reciprocal
    bound = tl.where(is_left, bound + _SLACK + _RELATIVE_SLACK * tl.abs(bound), float("-inf"))
    largest = tl.max(scaled_peaks)
    kept_mass = tl.full([], 0.0, tl.float32)
    if top_p < 1.0:
        if lowest == float("-inf"):
            mass = tl.load(masses + segments, mask=is_left, other=0.0)
            kept_mass = top_p * tl.sum(mass * tl.exp(scaled_peaks - largest))
        else:
            kept_mass = top_p * mass_before(row, scaled_peaks, listed, lowest, vocab, largest, 4 * CHUNK)
    token, end = tl.full([], 0, tl.int32), tl.full([], vocab, tl.int32)
    is_searching = tl.full([], True, tl.int1)
    while is_searching:
        token = _loudest(row, scaled_peaks, bound, listed, lowest, end, seed, offset, CHUNK)
        is_searching = tl.full([], False, tl.int1)
        if top_p < 1.0:
            lowest, end = scale(load_logits(values, token, token < vocab, 0.0), temperature, reciprocal), token
            before = mass_before(row, scaled_peaks, listed, lowest, end, largest, 4 * CHUNK)
            # The first always stays, even where top_p is so small that the product was 0.
            is_searching = (before >= kept_mass) & (before > 0.0)
    return token


@triton.jit
def _loudest(row, scaled_peaks, bound, listed, lowest, end, seed, offset, CHUNK: tl.constexpr):
    """The token with the largest score of those that come before token `end` with the scaled logit `lowest`.

    The segment with the highest bound first: what it brings rules out most of the others.
    """
    no_token = row[3]
    could_win = (scaled_peaks >= lowest) & (scaled_peaks > float("-inf"))
    bound = tl.where(could_win, bound, float("-inf"))
    is_first = tl.arange(0, bound.shape[0]) == tl.argmax(bound, axis=0)
    best, best_token = tl.full([], float("-inf"), tl.float32), tl.full([], no_token, tl.int32)
    for turn in range(2):
        count = list_segments(could_win & (bound >= best) & (is_first == (turn == 0)), listed)
        for first in range(0, count, CHUNK):
            tokens, inside, scaled = load_scaled(row, listed, first, count, CHUNK)
            segments, _ = load_chunk(listed, first + tl.arange(0, CHUNK), count)
            counters = segments * (SEGMENT // 4) + tl.arange(0, SEGMENT // 4)[None, :]
            noise = gumbel(tl.reshape(random_words(seed, offset, counters), tokens.shape))
            is_kept = inside & comes_before(tokens, scaled, lowest, end)
            scores = tl.where(is_kept, scaled + noise, float("-inf"))
            score = tl.max(scores)
            token = tl.min(tl.where(is_kept & (scores == score), tokens, no_token))
            is_better = (score > best) | ((score == best) & (token < best_token))
            best, best_token = tl.where(is_better, score, best), tl.where(is_better, token, best_token)
    return best_token
