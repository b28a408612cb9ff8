"""sampling on a GPU, the pass over all logits: what later steps must know of a segment to leave it alone.

A segment is 128 tokens. Of each are kept the largest logit, a bound on the largest sum of logit and noise, and the sum
of exponentials. Knows one reading of the logits; not which token is drawn.
"""

import triton
import triton.language as tl

from paceline_kernels.sampling.triton.noise import NOISE_AT_ZERO_BITS, NOISE_PER_BIT, bits_of_rest, random_words

SEGMENT = tl.constexpr(128)
MIN_TEMPERATURE = tl.constexpr(1e-5)
_LOG2_E = tl.constexpr(1.4426950408889634)
# A tile is [4 * segments, 32] tokens: the first quarters of all segments, then the second ones, and so on. A lane has
# 16 tokens of one segment in four loads of 16 bytes, 8 lanes have all of it, and three exchanges between them reduce
# it; as [segments, 128] it would take five for every 4 tokens of a lane.
_PIECES = tl.constexpr(4)
_PIECE = tl.constexpr(32)


@triton.jit(do_not_specialize=["num_segments"])
def survey_draws(
    logits,  # [rows, vocab], float32 or of 16 bits
    ruled,  # [rows, vocab] float32, or None
    is_ruled,  # [rows] int32: whether what is drawn from are these logits, or None
    temperatures,  # and what follows: [rows], see SamplingParameters
    top_ps,
    seeds,
    offsets,
    peaks,  # [rows, num_segments] float32: the largest logit; NaN if one was NaN or infinite as it came
    bounds,  # the same shape, set unless the row is greedy: no less than the largest of logit + temperature * gumbel
    masses,  # the same shape, set where top_p needs it: the sum of exp(scaled - scaled peak)
    vocab,
    num_segments,
    SEGMENTS: tl.constexpr,
):
    """Programs [part, row]: SEGMENTS segments each."""
    row, segments, first = _tile(SEGMENTS)
    # What depends on these is waited for while the logits are on their way.
    temperature, top_p = tl.load(temperatures + row), tl.load(top_ps + row)
    seed, offset = tl.load(seeds + row), tl.load(offsets + row)
    tokens = _elements(first, SEGMENTS, _PIECE)
    inside = tokens < vocab
    given = tl.load(logits + row * vocab + tokens, mask=inside, other=0.0).to(tl.float32)
    left = given
    if ruled is not None:
        if tl.load(is_ruled + row) != 0:
            left = tl.load(ruled + row * vocab + tokens, mask=inside, other=0.0)
    left = tl.where(inside, left, float("-inf"))
    peak = _max(left)
    exists = segments < num_segments
    places = row * num_segments + segments
    # A finite number times 0 is 0, any other is NaN.
    tl.store(peaks + places, peak + _sum(given * 0.0), mask=exists)
    if temperature >= MIN_TEMPERATURE:
        counters = _elements(first, SEGMENTS, _PIECE // 4)
        words = random_words(seed, offset, counters)
        rests = bits_of_rest(tl.reshape(words, tokens.shape))
        bound = _max(left - (temperature * NOISE_PER_BIT) * rests.to(tl.float32)) + temperature * NOISE_AT_ZERO_BITS
        tl.store(bounds + places, bound, mask=exists)
        if top_p < 1.0:
            reciprocal = tl.div_rn(1.0, temperature)
            scaled_peak = scale(peak, temperature, reciprocal)
            tl.store(masses + places, _mass(scale(left, temperature, reciprocal), scaled_peak), mask=exists)


@triton.jit(do_not_specialize=["num_segments"])
def survey_logprobs(
    logits,  # [rows, vocab], float32 or of 16 bits
    num_logprobs,  # [rows] int32; rows below 0 are left out
    peaks,  # [rows, num_segments] float32: the largest logit
    masses,  # the same shape: the sum of exp(logit - peak)
    vocab,
    num_segments,
    SEGMENTS: tl.constexpr,
):
    """Programs [part, row]: SEGMENTS segments each."""
    row, segments, first = _tile(SEGMENTS)
    tokens = _elements(first, SEGMENTS, _PIECE)
    if tl.load(num_logprobs + row) >= 0:
        values = tl.load(logits + row * vocab + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
        peak = _max(values)
        exists = segments < num_segments
        places = row * num_segments + segments
        tl.store(peaks + places, peak, mask=exists)
        tl.store(masses + places, _mass(values, peak), mask=exists)


@triton.jit
def scale(logits, temperature, reciprocal):
    """logits / temperature to the last bit, in four instructions (Markstein, 1990): a product, put right by its rest.

    reciprocal: 1 / temperature, rounded to nearest. Infinite where the quotient is.
    """
    product = logits * reciprocal
    rest = tl.fma(product, -temperature, logits)
    return tl.where(tl.abs(product) < float("inf"), tl.fma(rest, reciprocal, product), product)


@triton.jit
def _tile(SEGMENTS: tl.constexpr):
    """What a program does: its row, its segments, and the first of them."""
    first = tl.program_id(0) * SEGMENTS
    return tl.program_id(1).to(tl.int64), first + tl.arange(0, SEGMENTS), first


@triton.jit
def _elements(first, SEGMENTS: tl.constexpr, PIECE: tl.constexpr):
    """The numbers of a tile's elements, where a segment has four pieces of PIECE. Returns [4 * SEGMENTS, PIECE]."""
    pieces = tl.arange(0, _PIECES * SEGMENTS)
    starts = (first + pieces % SEGMENTS) * _PIECES + pieces // SEGMENTS
    return starts[:, None] * PIECE + tl.arange(0, PIECE)[None, :]


@triton.jit
def _by_segment(tile):
    """The same numbers as [4, segments, 32]."""
    return tl.reshape(tile, [_PIECES, tile.shape[0] // _PIECES, _PIECE])


@triton.jit
def _max(tile):
    """The largest number of each segment."""
    return tl.max(tl.max(_by_segment(tile), axis=0), axis=1)


@triton.jit
def _sum(tile):
    """The sum of each segment."""
    return tl.sum(tl.sum(_by_segment(tile), axis=0), axis=1)


@triton.jit
def _mass(tile, peaks):
    """The sum of exp(number - peak) of each segment, 0 where nothing is left; NaN where a number is NaN or +inf."""
    references = tl.where(peaks == float("-inf"), 0.0, peaks)
    masses = tl.exp2((_by_segment(tile) - references[None, :, None]) * _LOG2_E)
    return tl.sum(tl.sum(masses, axis=0), axis=1)
