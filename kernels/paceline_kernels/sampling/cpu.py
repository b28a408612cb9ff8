"""sampling for CPUs: row by row, each alone, of the tokens that one rank has, and then of all ranks.

Knows the definition in the package's docstring. Filters are kept as a threshold, so that nothing the size of the
vocabulary is sorted. A row that has rules or a mask is copied, so that log-probabilities are of the logits as given;
there are as many copies at a time as threads. Ranks tell each other a few integers for each row, and each finds the
same.
"""

import numba
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.sampling.columns import (
    LogitRules,
    Logprobs,
    SampleOutcome,
    Samples,
    SamplingParameters,
    TokenMasks,
    VocabularySlice,
)
from paceline_kernels.sampling.contenders import NONE, best_of, contender, token_of, value_of
from paceline_kernels.sampling.filters import (
    LIMITS,
    MASS_OF_ONE,
    MIN_TEMPERATURE,
    NUM_PASSES,
    NUM_RANGES,
    LimitArray,
    RowLogits,
    begin,
    left_of,
    mass_of,
    narrow,
    weigh,
)
from paceline_kernels.sampling.noise import loudest
from paceline_kernels.sampling.rules import RuleArrays, check_token_ids, rule_arrays
from paceline_kernels.vector import simd

_Float32Array = npt.NDArray[np.float32]
_Int32Array = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]

_EXPONENT_BITS = np.int32(0x7F800000)
# Plain integers for compiled code.
_DRAWN, _NOT_FINITE, _NOTHING_LEFT = (int(outcome) for outcome in SampleOutcome)
_INFINITE = 0x7F800000 << 32  # no contender of a finite number is so large
_BAD = 2**63 - 1


def sample(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    rules: LogitRules | None,
    masks: TokenMasks | None,
    max_logprobs: int | None,
    vocabulary: VocabularySlice,
) -> Samples:
    num_rows = logits.shape[0]
    token_ids, outcomes = torch.empty(num_rows, dtype=torch.int32), torch.empty(num_rows, dtype=torch.int32)
    # Two specialisations are compiled: without rules and masks, rows pay nothing for them.
    arrays = None
    if rules is not None or masks is not None:
        arrays = rule_arrays(rules, masks, num_rows, vocabulary.vocab_size)
    rows = RowLogits(logits.numpy(), vocabulary.start, parameters.temperature.numpy())
    found = np.empty(num_rows, np.int64)
    find_best(rows, arrays, found)
    best = drawn = _gathered(vocabulary, found).max(axis=0)
    if rows.temperature.max(initial=0) >= MIN_TEMPERATURE:
        limits = np.zeros(num_rows, LIMITS)
        begin(best, rows.temperature, parameters.min_p.numpy(), limits)
        top_k, top_p = parameters.top_k.numpy(), parameters.top_p.numpy()
        _search(rows, arrays, vocabulary, limits, top_k * (top_k < vocabulary.vocab_size), None)
        _search(rows, arrays, vocabulary, limits, top_p < 1, top_p)
        find_loudest(rows, arrays, best, limits, parameters.seeds.numpy(), parameters.offsets.numpy(), found)
        drawn = _gathered(vocabulary, found).max(axis=0)
    conclude(best, drawn, token_ids.numpy(), outcomes.numpy())
    logprobs = _logprobs(logits, token_ids, parameters.num_logprobs, max_logprobs, vocabulary)
    return Samples(token_ids, outcomes, logprobs.logprobs, logprobs.top_token_ids, logprobs.top_logprobs)


def _gathered(vocabulary: VocabularySlice, own: _Int64Array) -> _Int64Array:
    """[ranks, ...]."""
    gathered: _Int64Array = vocabulary.gather(torch.from_numpy(own)).numpy()
    return gathered


def _search(
    rows: RowLogits,
    rules: RuleArrays | None,
    vocabulary: VocabularySlice,
    limits: LimitArray,
    wanted: npt.NDArray[np.generic],
    top_p: _Float32Array | None,
) -> None:
    """wanted: how many tokens; with top_p, where it is on."""
    if not wanted.any():
        return
    limits["wanted"], limits["prefix"] = wanted * limits["is_drawn"], 0
    weights = np.empty((len(limits), NUM_RANGES), np.int64)
    for number in range(NUM_PASSES):
        weigh(rows, rules, limits, number, top_p is not None, weights)
        narrow(_gathered(vocabulary, weights), vocabulary.rank, number, top_p, limits)


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: torch.Tensor,
    max_logprobs: int | None,
    vocabulary: VocabularySlice,
) -> Logprobs:
    check_token_ids("token_logprobs", "token_ids", token_ids.numpy(), vocabulary.vocab_size)
    return _logprobs(logits, token_ids, num_logprobs, max_logprobs, vocabulary)


def _logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: torch.Tensor,
    max_logprobs: int | None,
    vocabulary: VocabularySlice,
) -> Logprobs:
    num_rows = logits.shape[0]
    most = int(num_logprobs.numpy().max(initial=-1))
    limit = most if max_logprobs is None else max_logprobs
    num_top = min(max(limit, 0), vocabulary.vocab_size)
    taken = Logprobs(
        logprobs=torch.empty(num_rows, dtype=torch.float32),
        top_token_ids=torch.empty((num_rows, num_top), dtype=torch.int32),
        top_logprobs=torch.empty((num_rows, num_top), dtype=torch.float32),
    )
    if min(most, limit) >= 0:
        wanted, start = num_logprobs.clamp(max=num_top).numpy(), vocabulary.start
        best = np.full((num_rows, max(num_top, 1)), NONE)
        list_best(logits.numpy(), start, wanted, best)
        of_all = np.concatenate(_gathered(vocabulary, best), axis=1)
        best = np.ascontiguousarray(np.sort(of_all, axis=1)[:, : -1 - best.shape[1] : -1])
        sums = np.empty((num_rows, 2), np.int64)
        sum_masses(logits.numpy(), start, wanted, token_ids.numpy(), best, sums)
        columns = (column.numpy() for column in (taken.logprobs, taken.top_token_ids, taken.top_logprobs))
        take_logprobs(_gathered(vocabulary, sums), best, wanted, *columns)
    return taken


@jit.compiled_parallel
def find_best(rows: RowLogits, rules: RuleArrays | None, best: _Int64Array) -> None:
    """The contender of each row's largest logit; _BAD where one is not finite as it came."""
    for row in numba.prange(len(best)):
        index = np.int64(row)  # of prange it is unsigned, and all below would be compiled twice
        if _all_finite(rows.logits[index]):
            best[index] = best_of(left_of(rows, rules, index), rows.start)
        else:
            best[index] = _BAD


@jit.compiled
def _all_finite(values: _Float32Array) -> bool:
    bits = values.view(np.int32)
    is_finite = True
    for i in range(bits.shape[0]):
        is_finite &= (bits[i] & _EXPONENT_BITS) != _EXPONENT_BITS
    return is_finite


@jit.compiled_parallel
def find_loudest(
    rows: RowLogits,
    rules: RuleArrays | None,
    best: _Int64Array,
    limits: LimitArray,
    seeds: _Int64Array,
    offsets: _Int32Array,
    loudest_ones: _Int64Array,
) -> None:
    """The contender of the largest score of each row, where it is drawn; where it is not, the best."""
    for row in numba.prange(len(best)):
        index = np.int64(row)
        if limits[index].is_drawn:
            scaled, lowest = left_of(rows, rules, index) / rows.temperature[index], limits[index].lowest
            last = _last_of(scaled, lowest, limits[index].num_lowest)
            loudest_ones[index] = loudest(scaled, rows.start, lowest, last, seeds[index], offsets[index])
        else:
            loudest_ones[index] = best[index]


@jit.compiled
def _last_of(scaled: _Float32Array, value: jit.Float32, count: int) -> int:
    """Where the first so many that have the value end."""
    if count >= len(scaled):
        return len(scaled)
    last = -1
    for place in range(len(scaled)):
        if scaled[place] == value and count > 0:
            last = place
            count -= 1
    return last


@jit.compiled_for_python
def conclude(best: _Int64Array, drawn: _Int64Array, token_ids: _Int32Array, outcomes: _Int32Array) -> None:
    """Token 0 where none was drawn."""
    for row in range(len(best)):
        outcomes[row], token_ids[row] = _DRAWN, token_of(drawn[row])
        if best[row] >= _INFINITE:
            outcomes[row], token_ids[row] = _NOT_FINITE, 0
        elif value_of(best[row]) == -np.inf:
            outcomes[row], token_ids[row] = _NOTHING_LEFT, 0


@jit.compiled_parallel
def list_best(logits: _Float32Array, start: int, wanted: _Int32Array, best: _Int64Array) -> None:
    """The contenders of the largest logits of the rows that want them, the largest first; one where they want none."""
    for row in numba.prange(logits.shape[0]):
        if wanted[row] == 0:
            best[row, 0] = contender(simd.maximum(simd.address(logits[row]), logits.shape[1]), 0)
        elif wanted[row] > 0:
            _take_best(logits[row], start, best[row, : wanted[row]])


@jit.compiled
def _take_best(logits: _Float32Array, start: int, best: _Int64Array) -> None:
    count, filled = len(best), 0
    places = np.empty(count, dtype=np.int64)
    for token in range(len(logits)):
        if filled == count and not logits[token] > logits[places[count - 1]]:
            continue
        place = min(filled, count - 1)
        while place > 0 and logits[token] > logits[places[place - 1]]:
            places[place] = places[place - 1]
            place -= 1
        places[place] = token
        filled = min(filled + 1, count)
    for i in range(filled):
        best[i] = contender(logits[places[i]], start + places[i])


@jit.compiled_parallel
def sum_masses(
    logits: _Float32Array, start: int, wanted: _Int32Array, token_ids: _Int32Array, best: _Int64Array, sums: _Int64Array
) -> None:
    """Of each row the mass of the tokens here, NONE where one is NaN or +inf, and the contender of its token."""
    for row in numba.prange(logits.shape[0]):
        if wanted[row] >= 0:
            sums[row, 0] = _mass_of_all(logits[row], value_of(best[row, 0]))
            place = np.int64(token_ids[row]) - start
            is_here = 0 <= place < logits.shape[1]
            sums[row, 1] = contender(logits[row, place], place) if is_here else NONE


@jit.compiled
def _mass_of_all(logits: _Float32Array, largest: jit.Float32) -> jit.Int64:
    total, is_good = np.int64(0), True
    for i in range(len(logits)):  # by index, for vector code
        total += mass_of(logits[i] - largest)
        is_good &= logits[i] < np.float32(np.inf)
    return total if is_good else NONE


@jit.compiled_for_python
def take_logprobs(
    gathered: _Int64Array,
    best: _Int64Array,
    wanted: _Int32Array,
    logprobs: _Float32Array,
    top_token_ids: _Int32Array,
    top_logprobs: _Float32Array,
) -> None:
    """gathered: [ranks, num_rows, 2], as `sum_masses` leaves them."""
    for row in range(len(wanted)):
        if wanted[row] >= 0:
            largest, mass = value_of(best[row, 0]), gathered[:, row, 0]
            is_good = mass.min() >= 0 and largest > -np.inf
            normalizer = largest + np.log(mass.sum() / MASS_OF_ONE) if is_good else np.nan
            logprobs[row] = value_of(gathered[:, row, 1].max()) - normalizer
            for i in range(wanted[row]):
                top_token_ids[row, i] = token_of(best[row, i])
                top_logprobs[row, i] = value_of(best[row, i]) - normalizer
