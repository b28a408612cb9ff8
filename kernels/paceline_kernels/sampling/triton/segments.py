"""sampling on a GPU: passes over those segments of a row that matter, in chunks, by one program.

A pass begins with a list of segments, chosen by what the survey found out about them, and reads their tokens from
memory. `row` is (its logits, temperature, 1 / temperature, vocab), where its logits are (those given, those that rules
have changed, whether it has rules), the second None where no row has any; `listed` and `gathered` are memory for lists.

Knows limits and ranks of scaled logits; not what is drawn, nor why a limit is where it is.
"""

import triton
import triton.language as tl

from paceline_kernels.sampling.triton.survey import SEGMENT, scale

LOWEST_KEY = tl.constexpr(-(2**31))
_HIGHEST_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def load_logits(values, tokens, inside, other):
    """The logits of some tokens of a row, float32. values: the first of `row`, or of another row's."""
    given, ruled, has_rules = values
    if ruled is None:
        return tl.load(given + tokens, mask=inside, other=other).to(tl.float32)
    else:
        # Either is of another type, so that no pointer can be chosen.
        left = tl.load(given + tokens, mask=inside & (has_rules == 0), other=other).to(tl.float32)
        return tl.where(has_rules == 0, left, tl.load(ruled + tokens, mask=inside & (has_rules != 0), other=other))


@triton.jit
def list_segments(chosen, listed):
    """Write the numbers of the chosen segments, ascending. chosen: [segments] bool. Returns how many there are."""
    tl.debug_barrier()  # a list made before has been read by now
    ones = chosen.to(tl.int32)
    tl.store(listed + tl.cumsum(ones, 0) - 1, tl.arange(0, chosen.shape[0]), mask=chosen)
    tl.debug_barrier()  # and this one is there for all
    return tl.sum(ones)


@triton.jit
def load_chunk(listed, place, count):
    """The numbers of CHUNK listed segments from `place` on, as a column, and whether there is one."""
    segments = tl.load(listed + place, mask=place < count, other=0)
    return segments[:, None], (place < count)[:, None]


@triton.jit
def load_scaled(row, listed, first, count, CHUNK: tl.constexpr):
    """The tokens of CHUNK listed segments, whether they exist, and their scaled logits. Each [CHUNK, SEGMENT]."""
    values, temperature, reciprocal, vocab = row
    segments, exists = load_chunk(listed, first + tl.arange(0, CHUNK), count)
    tokens = segments * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    inside = exists & (tokens < vocab)
    logits = load_logits(values, tokens, inside, float("-inf"))
    return tokens, inside, scale(logits, temperature, reciprocal)


@triton.jit
def comes_before(tokens, scaled, value, end):
    """Which tokens come before token `end` with the scaled logit `value`, in the order of top_p."""
    return (scaled > value) | ((scaled == value) & (tokens < end))


@triton.jit
def mass_before(row, scaled_peaks, listed, value, end, largest, CHUNK: tl.constexpr):
    """The sum of exp(scaled - largest) of all tokens that come before token `end` with the scaled logit `value`."""
    count = list_segments(scaled_peaks >= value, listed)
    masses = tl.zeros([CHUNK, SEGMENT], tl.float32)
    for first in range(0, count, CHUNK):
        tokens, inside, scaled = load_scaled(row, listed, first, count, CHUNK)
        is_before = inside & comes_before(tokens, scaled, value, end)
        masses += tl.where(is_before, tl.exp(scaled - largest), 0.0)
    return tl.sum(masses)


@triton.jit
def to_key(values):
    """Integers, int32, in the order of the floats; -0.0 is 0.0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_key(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def gather(row, count, listed, gathered, start, low, high, CHUNK: tl.constexpr, CAPACITY: tl.constexpr):
    """Write the tokens of `count` listed segments whose keys are in low:high behind `start` others, as far as they fit.

    They ascend. Returns `start` plus how many tokens there are, even if they did not fit.
    """
    found = tl.full([], start, tl.int32)
    tl.debug_barrier()  # what was gathered before has been read by now
    for first in range(0, count, CHUNK):
        tokens, inside, scaled = load_scaled(row, listed, first, count, CHUNK)
        keys = to_key(scaled)
        is_meant = tl.reshape(inside & (keys >= low) & (keys < high), [CHUNK * SEGMENT])
        ones = is_meant.to(tl.int32)
        places = found + tl.cumsum(ones, 0) - 1
        tl.store(gathered + places, tl.reshape(tokens, is_meant.shape), mask=is_meant & (places < CAPACITY))
        found += tl.sum(ones)
    tl.debug_barrier()  # and this is there for all
    return found


@triton.jit
def load_gathered(row, gathered, count, CAPACITY: tl.constexpr):
    """The gathered tokens, whether there is one, and their scaled logits. Each [CAPACITY]."""
    values, temperature, reciprocal, _ = row
    places = tl.arange(0, CAPACITY)
    tokens = tl.load(gathered + places, mask=places < count, other=0)
    logits = load_logits(values, tokens, places < count, float("-inf"))
    return tokens, places < count, scale(logits, temperature, reciprocal)


@triton.jit
def key_of_rank(row, scaled_peaks, num_segments, listed, gathered, rank, CHUNK: tl.constexpr, CAPACITY: tl.constexpr):
    """The key of the rank-th largest scaled logit of a row, 1 <= rank <= vocab.

    It is at least the rank-th largest of the peaks; usually all that is not below that fits into what is gathered, and
    is searched there. Otherwise the range of keys that holds it is halved until it fits.
    """
    peak_keys = to_key(scaled_peaks)
    low = tl.full([], LOWEST_KEY, tl.int32)
    if rank <= num_segments:
        low = _kth_largest(peak_keys, rank)
    high = tl.max(peak_keys) + 1
    trial = low
    is_searching, is_gathered = tl.full([], True, tl.int1), tl.full([], False, tl.int1)
    count = tl.full([], 0, tl.int32)
    while is_searching:
        num_listed = list_segments(peak_keys >= trial, listed)
        count = gather(row, num_listed, listed, gathered, 0, trial, high, CHUNK, CAPACITY)
        is_above = count >= rank
        low = tl.where(is_above, trial, low)
        high = tl.where(is_above, high, trial)
        rank = tl.where(is_above, rank, rank - count)
        is_gathered = is_above & (count <= CAPACITY)
        is_searching = (not is_gathered) & (low + 1 < high)
        trial = _middle(low, high)
    if is_gathered:
        _, exists, scaled = load_gathered(row, gathered, count, CAPACITY)
        low = _kth_largest(tl.where(exists, to_key(scaled), LOWEST_KEY), rank)
    return low


@triton.jit
def _kth_largest(keys, k):
    """By halving the range of keys until k of them are in its upper part. keys: [n], of which k are no padding."""
    low, high = tl.min(keys), tl.max(keys) + 1
    count = keys.shape[0]
    while (low + 1 < high) & (count != k):
        middle = _middle(low, high)
        above = tl.sum((keys >= middle).to(tl.int32))
        is_above = above >= k
        low = tl.where(is_above, middle, low)
        high = tl.where(is_above, high, middle)
        count = tl.where(is_above, above, count)
    return tl.min(tl.where(keys >= low, keys, _HIGHEST_KEY))


@triton.jit
def _middle(low, high):
    """Between two keys, however far apart."""
    return ((low.to(tl.int64) + high) >> 1).to(tl.int32)
