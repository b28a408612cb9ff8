"""sampling for CPUs: row by row, each alone.

Knows the definition in the package's docstring. Filters are kept as a threshold, so that nothing the size of the
vocabulary is sorted: what top_p sorts is first cut down to tokens that could be kept. A row that has rules is copied,
so that log-probabilities are of the logits as given; there are as many copies at a time as threads.
"""

import numba
import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.sampling.columns import LogitRules, Logprobs, SampleOutcome, Samples, SamplingParameters
from paceline_kernels.sampling.noise import loudest
from paceline_kernels.sampling.rules import RuleArrays, check_token_ids, rule_arrays, ruled
from paceline_kernels.vector import simd
from paceline_kernels.vector.elementary import exp

_Float32Array = npt.NDArray[np.float32]
_Int32Array = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]


_MIN_TEMPERATURE = np.float32(1e-5)
_EXPONENT_BITS = np.int32(0x7F800000)
# Plain integers for compiled code.
_DRAWN, _NOT_FINITE, _NOTHING_LEFT = (int(outcome) for outcome in SampleOutcome)


def sample(
    logits: torch.Tensor, parameters: SamplingParameters, rules: LogitRules | None, max_logprobs: int | None
) -> Samples:
    num_rows = logits.shape[0]
    token_ids, outcomes = torch.empty(num_rows, dtype=torch.int32), torch.empty(num_rows, dtype=torch.int32)
    # Two specialisations are compiled: without rules, rows pay nothing for them.
    draw_rows(
        logits.numpy(),
        parameters.temperature.numpy(),
        parameters.top_k.numpy(),
        parameters.top_p.numpy(),
        parameters.min_p.numpy(),
        parameters.seeds.numpy(),
        parameters.offsets.numpy(),
        None if rules is None else rule_arrays(rules, logits.shape[1]),
        token_ids.numpy(),
        outcomes.numpy(),
    )
    logprobs = _logprobs(logits, token_ids, parameters.num_logprobs, max_logprobs)
    return Samples(token_ids, outcomes, logprobs.logprobs, logprobs.top_token_ids, logprobs.top_logprobs)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: torch.Tensor, max_logprobs: int | None
) -> Logprobs:
    check_token_ids("token_logprobs", "token_ids", token_ids.numpy(), logits.shape[1])
    return _logprobs(logits, token_ids, num_logprobs, max_logprobs)


def _logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: torch.Tensor, max_logprobs: int | None
) -> Logprobs:
    num_rows, vocab_size = logits.shape
    most = int(num_logprobs.numpy().max(initial=-1))
    limit = most if max_logprobs is None else max_logprobs
    num_top = min(max(limit, 0), vocab_size)
    taken = Logprobs(
        logprobs=torch.empty(num_rows, dtype=torch.float32),
        top_token_ids=torch.empty((num_rows, num_top), dtype=torch.int32),
        top_logprobs=torch.empty((num_rows, num_top), dtype=torch.float32),
    )
    if min(most, limit) >= 0:
        take_logprobs(
            logits.numpy(),
            token_ids.numpy(),
            num_logprobs.clamp(max=limit).numpy(),
            taken.logprobs.numpy(),
            taken.top_token_ids.numpy(),
            taken.top_logprobs.numpy(),
        )
    return taken


@jit.compiled_parallel
def draw_rows(
    logits: _Float32Array,
    temperature: _Float32Array,
    top_k: _Int32Array,
    top_p: _Float32Array,
    min_p: _Float32Array,
    seeds: _Int64Array,
    offsets: _Int32Array,
    rules: RuleArrays | None,
    token_ids: _Int32Array,
    outcomes: _Int32Array,
) -> None:
    """Draw a token per row, and say whether one was drawn; token 0 where none was."""
    if logits.shape[0] == 1:
        token_ids[0], outcomes[0] = _draw_row(
            logits[0], temperature[0], top_k[0], top_p[0], min_p[0], seeds[0], offsets[0], np.int64(0), rules
        )
    else:
        for row in numba.prange(logits.shape[0]):
            index = np.int64(row)  # of prange it is unsigned, and all below would be compiled twice
            token_ids[row], outcomes[row] = _draw_row(
                logits[row],
                temperature[row],
                top_k[row],
                top_p[row],
                min_p[row],
                seeds[row],
                offsets[row],
                index,
                rules,
            )


@jit.compiled
def _draw_row(
    logits: _Float32Array,
    temperature: jit.Float32,
    top_k: int,
    top_p: jit.Float32,
    min_p: jit.Float32,
    seed: int,
    offset: int,
    row: np.int64,
    rules: RuleArrays | None,
) -> tuple[int, int]:
    """The token of one row, and a SampleOutcome."""
    if not _all_finite(logits):
        return 0, _NOT_FINITE
    if rules is not None:
        logits = ruled(logits, row, rules)
        if simd.maximum(simd.address(logits), len(logits)) == -np.inf:
            return 0, _NOTHING_LEFT
    if temperature < _MIN_TEMPERATURE:
        return _greedy(logits), _DRAWN
    return _draw(logits, temperature, top_k, top_p, min_p, seed, offset), _DRAWN


@jit.compiled
def _all_finite(values: _Float32Array) -> bool:
    bits = values.view(np.int32)
    is_finite = True
    for i in range(bits.shape[0]):
        is_finite &= (bits[i] & _EXPONENT_BITS) != _EXPONENT_BITS
    return is_finite


@jit.compiled
def _greedy(logits: _Float32Array) -> int:
    largest = simd.maximum(simd.address(logits), logits.shape[0])
    for token in range(logits.shape[0]):
        if logits[token] == largest:
            return token
    return 0


@jit.compiled
def _draw(
    logits: _Float32Array,
    temperature: jit.Float32,
    top_k: int,
    top_p: jit.Float32,
    min_p: jit.Float32,
    seed: int,
    offset: int,
) -> int:
    """Draw from one row of logits, of which at least one is not masked."""
    scaled = logits / temperature
    largest = simd.maximum(simd.address(scaled), len(scaled))
    if not np.isfinite(largest):
        return _greedy(logits)
    threshold, last_at_threshold = np.float32(-np.inf), scaled.shape[0]
    if min_p > 0:
        threshold = largest + np.log(min_p)
    if 0 < top_k < scaled.shape[0]:
        threshold = max(threshold, _kth_largest(scaled, top_k))
    if top_p < 1:
        threshold, last_at_threshold = _cut_top_p(scaled, largest, threshold, top_p)
    return loudest(scaled, threshold, last_at_threshold, seed, offset)


@jit.compiled
def _kth_largest(scaled: _Float32Array, k: int) -> jit.Float32:
    """Hoare's selection: the part of a copy that holds rank k is split around a pivot until it is one value."""
    values = scaled.copy()
    low, high = 0, len(values) - 1
    while low < high:
        pivot = values[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while values[left] > pivot:
                left += 1
            while values[right] < pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if k - 1 <= right:
            high = right
        elif k - 1 >= left:
            low = left
        else:
            break
    return values[k - 1]


@jit.compiled
def _cut_top_p(
    scaled: _Float32Array, largest: jit.Float32, threshold: jit.Float32, top_p: jit.Float32
) -> tuple[jit.Float32, int]:
    """The value and the token that top_p keeps last, of those at or above the threshold."""
    masses = np.empty(len(scaled), dtype=np.float32)
    for i in range(len(scaled)):
        masses[i] = exp(scaled[i] - largest)
    total, num_left = 0.0, 0
    for i in range(len(scaled)):
        if scaled[i] >= threshold:
            total += masses[i]
            num_left += 1
    # All tokens below this mass together weigh less than 1 - top_p: top_p keeps none of them.
    smallest_mass = (1.0 - top_p) * total / num_left
    values = np.empty(num_left, dtype=np.float32)
    num_values = 0
    for i in range(len(scaled)):
        if scaled[i] >= threshold and masses[i] >= smallest_mass:
            values[num_values] = scaled[i]
            num_values += 1
    values = np.sort(values[:num_values])[::-1]
    before, num_kept = exp(values[0] - largest), 1
    while num_kept < num_values and before < top_p * total:
        before += exp(values[num_kept] - largest)
        num_kept += 1
    return _last_kept(scaled, values[:num_kept])


@jit.compiled
def _last_kept(scaled: _Float32Array, kept: _Float32Array) -> tuple[jit.Float32, int]:
    """The smallest of the kept values, and the token that is the last to have it; lower ids were kept first."""
    smallest = kept[len(kept) - 1]
    num_ties = 0
    for value in kept:
        num_ties += value == smallest
    last = 0
    for token in range(len(scaled)):
        if scaled[token] == smallest and num_ties > 0:
            last = token
            num_ties -= 1
    return smallest, last


@jit.compiled_parallel
def take_logprobs(
    logits: _Float32Array,
    token_ids: _Int32Array,
    num_logprobs: _Int32Array,
    logprobs: _Float32Array,
    top_token_ids: _Int32Array,
    top_logprobs: _Float32Array,
) -> None:
    """Fill in the log-probabilities of the rows that want them."""
    for row in numba.prange(logits.shape[0]):
        if num_logprobs[row] >= 0:
            normalizer = _log_sum_exp(logits[row])
            logprobs[row] = logits[row, token_ids[row]] - normalizer
            count = min(num_logprobs[row], top_token_ids.shape[1])
            _take_best(logits[row], top_token_ids[row, :count])
            for i in range(count):
                top_logprobs[row, i] = logits[row, top_token_ids[row, i]] - normalizer


@jit.compiled
def _log_sum_exp(logits: _Float32Array) -> jit.Float32:
    largest = simd.maximum(simd.address(logits), logits.shape[0])
    total = 0.0
    for value in logits:
        total += exp(value - largest)
    return largest + np.log(total)


@jit.compiled
def _take_best(logits: _Float32Array, best: _Int32Array) -> None:
    """The ids of the largest logits, the largest first, the lower id first on ties."""
    count = best.shape[0]
    if count == 0:
        return
    filled = 0
    for token in range(logits.shape[0]):
        if filled == count and not logits[token] > logits[best[count - 1]]:
            continue
        place = min(filled, count - 1)
        while place > 0 and logits[token] > logits[best[place - 1]]:
            best[place] = best[place - 1]
            place -= 1
        best[place] = token
        filled = min(filled + 1, count)
