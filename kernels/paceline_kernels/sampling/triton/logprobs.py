"""sampling on a GPU: log-probabilities of a row's given token and of its best ones, from what the survey found.

Knows logits as they came; not temperature, filters or rules.
"""

import triton
import triton.language as tl

from paceline_kernels.sampling.triton.segments import (
    gather,
    key_of_rank,
    list_segments,
    load_gathered,
    load_logits,
    to_key,
)

_NO_ORDER = tl.constexpr(-(2**63))
_LARGEST_ID = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num_segments", "width"])
def take_logprobs_kernel(
    logits,  # [rows, vocab], float32 or of 16 bits
    token_ids,  # [rows] int32; one beyond the vocabulary has the log-probability NaN
    num_logprobs,  # [rows] int32
    peaks,  # and the next: [rows, num_segments] float32, what the survey found
    masses,
    listed,  # [rows, PADDED] int32, for the program's own use
    gathered,  # [rows, CAPACITY] int32, the same
    logprobs,  # [rows] float32
    top_token_ids,  # [rows, width] int32
    top_logprobs,  # [rows, width] float32
    vocab,
    num_segments,
    width,
    PADDED: tl.constexpr,  # at least num_segments, a power of two
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,  # at least width
):
    """A program per row, the last one first: the survey read it last, so that it is in the cache."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    wanted = tl.load(num_logprobs + row)
    if wanted >= 0:
        values = (logits + row * vocab, None, None)
        segments = tl.arange(0, PADDED)
        peaks += row * num_segments
        masses += row * num_segments
        peak = tl.load(peaks + segments, mask=segments < num_segments, other=float("-inf"))
        mass = tl.load(masses + segments, mask=segments < num_segments, other=0.0)
        largest = tl.max(peak)
        total = tl.sum(mass * tl.exp(peak - largest))  # NaN where a logit is NaN or +inf
        token = tl.load(token_ids + row)
        value = load_logits(values, token, (token >= 0) & (token < vocab), float("nan"))
        tl.store(logprobs + row, value - largest - tl.log(total))
        count = tl.minimum(wanted, width)
        top_token_ids += row * width
        top_logprobs += row * width
        listed += row * PADDED
        gathered += row * CAPACITY
        if (count > 0) & (total == total):
            unscaled = (values, 1.0, 1.0, vocab)
            lowest = key_of_rank(unscaled, peak, num_segments, listed, gathered, count, CHUNK, CAPACITY)
            order = _in_order(unscaled, peak, listed, gathered, lowest, CHUNK, CAPACITY)
            for place in range(count):
                best = tl.max(order)
                token = ((best & _LARGEST_ID) ^ _LARGEST_ID).to(tl.int32)
                tl.store(top_token_ids + place, token)
                tl.store(top_logprobs + place, load_logits(values, token, token < vocab, 0.0) - largest - tl.log(total))
                order = tl.where(order == best, _NO_ORDER, order)
        else:
            for place in range(count):
                tl.store(top_token_ids + place, 0)
                tl.store(top_logprobs + place, float("nan"))


@triton.jit
def _in_order(row, peak, listed, gathered, lowest, CHUNK: tl.constexpr, CAPACITY: tl.constexpr):
    """All tokens from the key `lowest` on, each as a number that is larger the likelier it is, and the lower its id.

    Gathered are first those above it, fewer than fit, then those that tie with it, the lowest ids. Returns [CAPACITY].
    """
    keys = to_key(peak)
    num_listed = list_segments(keys >= lowest, listed)
    count = tl.full([], 0, tl.int32)
    low, high = lowest + 1, tl.max(keys) + 1
    for _ in range(2):
        count = gather(row, num_listed, listed, gathered, count, low, high, CHUNK, CAPACITY)
        low, high = lowest, lowest + 1
    tokens, exists, logits = load_gathered(row, gathered, count, CAPACITY)
    order = (to_key(logits).to(tl.int64) << 32) | (tokens ^ _LARGEST_ID)
    return tl.where(exists, order, _NO_ORDER)
