"""What filters keep of a row, for CPUs: a limit, found with nothing sorted and no logit told to another rank.

top_k and top_p are one search, for the value at which the tokens from the largest down weigh so much: k tokens, or a
share of all masses. Each pass tells the weights of 256 ranges of values, then of 256 parts of the range in which the
limit is. Weights are integers, so that their sums are the same however the vocabulary is cut, and in whatever order.
"""

from typing import Any, NamedTuple, TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from paceline_kernels.compiler import jit
from paceline_kernels.sampling.contenders import key_of, value_of, value_of_key
from paceline_kernels.sampling.rules import RuleArrays, ruled
from paceline_kernels.vector import simd
from paceline_kernels.vector.elementary import exp_of_negative

_Float32Array = npt.NDArray[np.float32]
_Int32Array = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]
LimitArray = npt.NDArray[np.void]
Limit: TypeAlias = Any  # one of LIMITS

NUM_RANGES = 256
NUM_PASSES = 4
_RANGE_BITS = 8
MIN_TEMPERATURE = np.float32(1e-5)
_LOWEST_KEY = -(2**31)
_LOW_BITS = 24
_HIGH_OF_ONE, _LOW_OF_ONE = np.float32(2.0**20), np.float32(2.0**_LOW_BITS)
MASS_OF_ONE = 2.0**44  # the masses of 2**19 tokens fit into 63 bits
_TILE = 256
_ALL = 2**31


class RowLogits(NamedTuple):
    """What rows draw from, as compiled code takes it."""

    logits: _Float32Array  # [num_rows, columns]
    start: int  # the token of the first column
    temperature: _Float32Array


LIMITS = np.dtype(
    [
        ("is_drawn", np.bool_),  # with noise
        ("largest", np.float32),  # of all scaled logits
        ("lowest", np.float32),  # that may be drawn
        ("num_lowest", np.int64),  # of the tokens here that have it, the first ones, how many may be drawn
        ("wanted", np.int64),  # the weight of the tokens in the range, from the largest down to the limit; 0: no search
        ("prefix", np.int64),  # of the keys in the range, counted from the lowest key
    ],
    align=True,
)
"""Of a row: what of it may be drawn, and what is searched for now."""


@jit.compiled
def left_of(rows: RowLogits, rules: RuleArrays | None, row: np.int64) -> _Float32Array:
    """The logits that rules leave."""
    given: _Float32Array = rows.logits[row]
    return given if rules is None else ruled(given, rows.start, row, rules)


@jit.compiled_for_python
def begin(best: _Int64Array, temperature: _Float32Array, min_p: _Float32Array, limits: LimitArray) -> None:
    """best: of each row the contender of the largest logit."""
    for row in range(len(best)):
        limit = limits[row]
        limit.largest = value_of(best[row]) / max(temperature[row], MIN_TEMPERATURE)
        limit.is_drawn = temperature[row] >= MIN_TEMPERATURE and np.isfinite(limit.largest)
        limit.lowest = limit.largest + np.log(min_p[row]) if min_p[row] > 0 else np.float32(-np.inf)
        limit.num_lowest = _ALL


@jit.compiled
def mass_of(difference: jit.Float32) -> jit.Int64:
    """Of a logit that is so much below the largest, rounded down."""
    mass = exp_of_negative(difference) * _HIGH_OF_ONE
    high = np.int32(mass)  # in two parts, since vectors have no conversion to 64 bits
    low = np.int32((mass - np.float32(high)) * _LOW_OF_ONE)
    return (np.int64(high) << _LOW_BITS) + np.int64(low)


@jit.compiled_parallel
def weigh(
    rows: RowLogits, rules: RuleArrays | None, limits: LimitArray, number: int, by_mass: bool, weights: _Int64Array
) -> None:
    """The weights of the ranges of each row's pass of this number. weights: [num_rows, NUM_RANGES]."""
    for row in numba.prange(rows.logits.shape[0]):
        index = np.int64(row)  # of prange it is unsigned, and all below would be compiled twice
        if limits[index].wanted > 0:
            left, temperature = left_of(rows, rules, index), rows.temperature[index]
            _weigh_row(left, temperature, limits[index], number, by_mass, weights[index])


@jit.compiled
def _weigh_row(
    left: _Float32Array, temperature: jit.Float32, limit: Limit, number: int, by_mass: bool, weights: _Int64Array
) -> None:
    shift, first = _RANGE_BITS * (NUM_PASSES - 1 - number), limit.prefix << _RANGE_BITS
    lowest = value_of_key(np.int32((first << shift) + _LOWEST_KEY))  # below -inf it is NaN
    if by_mass and not lowest >= limit.lowest:
        lowest = limit.lowest
    places, masses = np.empty(_TILE, dtype=np.int64), np.ones(_TILE, dtype=np.int64)
    weights[:] = 0
    for start in range(0, len(left), _TILE):
        tile = left[start : start + _TILE]
        if simd.maximum(simd.address(tile), len(tile)) / temperature < lowest:
            continue
        for i in range(len(tile)):
            value = tile[i] / temperature
            place = ((np.int64(key_of(value)) - _LOWEST_KEY) >> shift) - first
            places[i] = -1 if value < lowest else place
        if by_mass:
            for i in range(len(tile)):
                masses[i] = mass_of(tile[i] / temperature - limit.largest)
        for i in range(len(tile)):
            if 0 <= places[i] < NUM_RANGES:
                weights[places[i]] += masses[i]


@jit.compiled_for_python
def narrow(gathered: _Int64Array, rank: int, number: int, top_p: _Float32Array | None, limits: LimitArray) -> None:
    """Choose the range in which the limit is; the last pass's is a value. top_p: None where tokens are counted.

    gathered: [ranks, num_rows, NUM_RANGES]; this is rank `rank`.
    """
    for row in range(gathered.shape[1]):
        limit = limits[row]
        if limit.wanted == 0:
            continue
        weights = gathered[:, row].sum(axis=0)
        if top_p is not None and number == 0:
            limit.wanted = max(1, np.int64(np.ceil(top_p[row] * weights.sum())))
        place = NUM_RANGES - 1
        while place > 0 and weights[place] < limit.wanted:
            limit.wanted -= weights[place]
            place -= 1
        limit.prefix = limit.prefix * NUM_RANGES + place
        if number == NUM_PASSES - 1:
            value = value_of_key(np.int32(limit.prefix + _LOWEST_KEY))
            limit.lowest = max(limit.lowest, value)
            if top_p is not None:
                mass = mass_of(value - limit.largest)
                num_before = gathered[:rank, row, place].sum() // mass
                limit.num_lowest = max(0, (limit.wanted + mass - 1) // mass - num_before)
