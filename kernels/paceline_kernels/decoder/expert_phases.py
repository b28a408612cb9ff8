"""The phases in which tokens of a mixture choose experts, go through their gates, and add up what comes down.

Knows what one piece computes. They stand for the gates and products of `phases` in all layers of a mixture, also in
those without experts. A token's logits and choice are its own, and so is its sum, in the order of its choice with the
network for all tokens last: bits do not depend on who else goes through an expert.

Slots lie expert by expert, which takes the choices of all tokens of a block: who finishes the last logits of a few
tokens chooses for them, and who is the last to do so in a block sorts its slots.
"""

import numpy as np

from paceline_kernels.compiler import jit
from paceline_kernels.decoder import phase_pool
from paceline_kernels.decoder.phases import OUTPUT_TILES, TOKENS_PER_PIECE, dot, is_wanted, let_through
from paceline_kernels.decoder.state import (
    DOWN,
    EXPERTS_DOWN,
    EXPERTS_GATE_UP,
    FEED_FORWARD_NORM,
    GATE_UP,
    ROUTER,
    SHARED_GATE,
    WIDTH,
    Activations,
    Batch,
    Float32Array,
    MixtureState,
    PackedWeights,
    Quantized,
    Shape,
    fed,
    has_extra,
    hidden,
)
from paceline_kernels.quantized_linear.cpu import dot_tiles, quantize_groups, tile_bytes
from paceline_kernels.quantized_linear.packing import GROUP, TILE
from paceline_kernels.routing import Routing, Score
from paceline_kernels.vector import simd
from paceline_kernels.vector.elementary import exp

# Tokens and experts of a piece of routing: 8 rows of a router are some 64 KiB.
_TOKENS_PER_ROUTE = 16
_EXPERTS_PER_ROUTE = 8
# A worker keeps 32 results of each slot of a block: 512 KiB, in a second-level cache.
_SLOTS_PER_BLOCK = 4096
_COLUMNS = OUTPUT_TILES * TILE  # as many as a group has inputs
_SCORES = tuple(Score)
_SOFTMAX, _SIGMOID, _OF_CHOSEN = (_SCORES.index(s) for s in (Score.SOFTMAX, Score.SIGMOID, Score.SOFTMAX_OF_CHOSEN))
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_NAN, _BELOW_ALL = np.float32("nan"), np.float32("-inf")
_SMALL = np.float32(1e-20)


def new_mixture(routing: Routing, intermediate: int, shape: Shape, num_tokens: int) -> MixtureState:
    """Memory for so many tokens, and for all workers that there may be."""
    k, num_experts = routing.top_k, routing.num_experts
    per_block = max(1, _SLOTS_PER_BLOCK // k // _TOKENS_PER_ROUTE) * _TOKENS_PER_ROUTE
    num_blocks, num_units = -(-num_tokens // per_block), num_experts + 1 + per_block * (k + 1) // TOKENS_PER_PIECE
    num_workers, num_results = jit.max_threads(), min(per_block, num_tokens) * (k + 1) + 1
    return MixtureState(
        num_experts=num_experts,
        top_k=k,
        intermediate=intermediate,
        score=_SCORES.index(routing.score),
        renormalises=int(routing.renormalises),
        scaling=np.float32(routing.scaling),
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
        tokens_per_block=per_block,
        scores=np.empty((num_tokens, 2 * num_experts + routing.num_groups), dtype=np.float32),
        choices=np.empty((num_tokens, k), dtype=np.int32),
        weights=np.empty((num_tokens, k + 1), dtype=np.float32),
        places=np.empty((num_tokens, k), dtype=np.int32),
        tokens=np.empty(num_tokens * k, dtype=np.int32),
        next_places=np.empty((shape.num_layers, num_blocks, num_experts), dtype=np.int32),
        units=np.empty((num_blocks, num_units, 3), dtype=np.int32),
        num_units=np.empty((shape.num_layers, num_blocks, 3), dtype=np.int64),
        counters=phase_pool.new_counters(-(-num_tokens // _TOKENS_PER_ROUTE) + num_blocks),
        gathered=np.empty(num_workers, dtype=np.int64),
        gathered_integers=np.empty((num_workers, TOKENS_PER_PIECE, shape.hidden), dtype=np.int8),
        gathered_scales=np.empty((num_workers, TOKENS_PER_PIECE, shape.hidden // GROUP), dtype=np.float32),
        gathered_sums=np.empty((num_workers, TOKENS_PER_PIECE, shape.hidden // GROUP), dtype=np.float32),
        results=np.empty((num_workers, num_results * _COLUMNS), dtype=np.float32),
    )


# Routing


@jit.compiled
def _num_route_blocks(num_tokens: int) -> int:
    return (num_tokens + _TOKENS_PER_ROUTE - 1) // _TOKENS_PER_ROUTE


@jit.compiled
def _num_chunks(layer: int, weights: PackedWeights, mixture: MixtureState) -> int:
    """Of the experts of a layer; one where nothing is routed."""
    has_router = weights.matrices[layer, ROUTER, 0] != 0
    return (mixture.num_experts + _EXPERTS_PER_ROUTE - 1) // _EXPERTS_PER_ROUTE if has_router else 1


@jit.compiled
def num_route_pieces(layer: int, num_tokens: int, weights: PackedWeights, mixture: MixtureState) -> int:
    return _num_route_blocks(num_tokens) * _num_chunks(layer, weights, mixture)


@jit.compiled
def route(
    piece: int, layer: int, shape: Shape, weights: PackedWeights, mixture: MixtureState, batch: Batch, work: Activations
) -> None:
    """Logits of some tokens for some experts, and what follows from the last of them."""
    num_tokens = batch.token_ids.shape[0]
    num_parts, router = _num_route_blocks(num_tokens), weights.matrices[layer, ROUTER, 0]
    part, expert = piece % num_parts, piece // num_parts * _EXPERTS_PER_ROUTE
    first, end = part * _TOKENS_PER_ROUTE, min(num_tokens, (part + 1) * _TOKENS_PER_ROUTE)
    if router != 0:
        rows = router + simd.FLOAT_BYTES * shape.hidden * expert
        count, stride = min(_EXPERTS_PER_ROUTE, mixture.num_experts - expert), mixture.scores.shape[1]
        x, out = simd.address(work.addend[first]), simd.address(mixture.scores[first, expert:])
        width = shape.hidden
        simd.dot_rows(x, width, end - first, rows, width, count, width, None, out, stride, work.addend)
    if phase_pool.finish(mixture.counters, part, 1) + 1 < _num_chunks(layer, weights, mixture):
        return
    phase_pool.reset(mixture.counters, part)
    for token in range(first, end):
        mixture.weights[token, mixture.top_k] = _ONE
        if layer == shape.num_layers - 1 and not is_wanted(token, 1, batch):
            mixture.choices[token, 0] = -1
        elif router != 0:
            _choose(token, layer, shape, weights, mixture, work)
        else:
            mixture.choices[token, 0] = 0
    block = first // mixture.tokens_per_block
    tokens_in_block = min(mixture.tokens_per_block, num_tokens - block * mixture.tokens_per_block)
    if phase_pool.finish(mixture.counters, num_parts + block, 1) + 1 == _num_route_blocks(tokens_in_block):
        phase_pool.reset(mixture.counters, num_parts + block)
        _sort(block, block * mixture.tokens_per_block, tokens_in_block, layer, weights, mixture)


@jit.compiled
def _choose(
    token: int, layer: int, shape: Shape, weights: PackedWeights, mixture: MixtureState, work: Activations
) -> None:
    """What `experts.route` chooses, and the weight of the shared expert."""
    count, bias = mixture.num_experts, weights.matrices[layer, ROUTER, 1]
    gate_at = weights.matrices[layer, SHARED_GATE, 0]
    scores, ranking = mixture.scores[token, :count], mixture.scores[token, count : 2 * count]
    chosen, shares = mixture.choices[token], mixture.weights[token, : mixture.top_k]
    sum_of_scores = _score(scores, mixture.score)
    for i in range(count):
        ranking[i] = scores[i]
    if bias != 0:
        simd.blend(bias, _ONE, simd.address(ranking), _ONE, count)
    if mixture.top_groups < mixture.num_groups:
        _leave_best_groups(ranking, mixture.scores[token, 2 * count :], mixture.top_groups)
    for choice in range(mixture.top_k):
        chosen[choice] = _take_best(ranking)
        shares[choice] = scores[chosen[choice]]
    if mixture.score == _OF_CHOSEN:
        _score(shares, _SOFTMAX)
    total = _SMALL if mixture.score == _SIGMOID else _ZERO
    for share in shares:
        total += share
    for choice in range(mixture.top_k):
        share = shares[choice] / total if mixture.renormalises != 0 else shares[choice]
        shares[choice] = share * mixture.scaling
        if sum_of_scores != sum_of_scores:
            chosen[choice], shares[choice] = choice, _NAN
    if gate_at != 0:
        product = simd.dot(simd.address(work.addend[token]), gate_at, shape.hidden)
        mixture.weights[token, mixture.top_k] = _ONE / (_ONE + exp(-product))


@jit.compiled
def _score(x: Float32Array, score: int) -> jit.Float32:
    """Make logits scores; returns their sum, which is NaN if one is."""
    if score == _SOFTMAX:
        largest, total = _BELOW_ALL, _ZERO
        for i in range(x.shape[0]):
            largest = max(largest, x[i])
        for i in range(x.shape[0]):
            x[i] = exp(x[i] - largest)
            total += x[i]
        for i in range(x.shape[0]):
            x[i] /= total
    elif score == _SIGMOID:
        for i in range(x.shape[0]):
            x[i] = _ONE / (_ONE + exp(-x[i]))
    total = _ZERO
    for each in x:
        total += each
    return total


@jit.compiled
def _take_best(values: Float32Array) -> int:
    """The place of the largest, of equal ones the first; what was taken is NaN from then on."""
    best = 0
    for i in range(values.shape[0]):
        if values[i] > values[best] or values[best] != values[best]:
            best = i
    values[best] = _NAN
    return best


@jit.compiled
def _leave_best_groups(ranking: Float32Array, values: Float32Array, top_groups: int) -> None:
    """Experts of all other groups rank below all numbers. values: memory for a number per group."""
    size = ranking.shape[0] // values.shape[0]
    for group in range(values.shape[0]):
        best, second = _BELOW_ALL, _BELOW_ALL
        for value in ranking[group * size : (group + 1) * size]:
            best, second = max(best, value), max(second, min(best, value))
        values[group] = best + second if size > 1 else best
    for _ in range(top_groups):
        _take_best(values)
    for group in range(values.shape[0]):
        if values[group] == values[group]:
            ranking[group * size : (group + 1) * size] = _BELOW_ALL


@jit.compiled
def _sort(block: int, start: int, num_tokens: int, layer: int, weights: PackedWeights, mixture: MixtureState) -> None:
    """Lay the slots of a block's tokens, which begin with token `start`, expert by expert, and cut them into units."""
    k, end = mixture.top_k, start + num_tokens
    units, next_places = mixture.units[block], mixture.next_places[layer, block]
    num_units, place, num_read, counts = 0, 0, 0, mixture.num_units[layer, block]
    next_places[:] = 0
    if weights.matrices[layer, ROUTER, 0] != 0:
        for token in range(start, end):
            for choice in range(k if mixture.choices[token, 0] >= 0 else 0):
                next_places[mixture.choices[token, choice]] += 1
        for expert in range(mixture.num_experts):
            count, next_places[expert] = next_places[expert], place
            for first in range(place, place + count, TOKENS_PER_PIECE):
                units[num_units, 0], units[num_units, 1] = expert, start * k + first
                units[num_units, 2] = min(TOKENS_PER_PIECE, place + count - first)
                num_units += 1
            place += count
            num_read += count > 0
        for token in range(start, end):
            for choice in range(k if mixture.choices[token, 0] >= 0 else 0):
                expert = mixture.choices[token, choice]
                mixture.places[token, choice] = next_places[expert]
                mixture.tokens[start * k + next_places[expert]] = token
                next_places[expert] += 1
    counts[0], counts[2] = num_units, num_read
    for first in range(start, end if weights.layer_options[layer, WIDTH] > 0 else start, TOKENS_PER_PIECE):
        count, is_read = min(TOKENS_PER_PIECE, end - first), False
        for token in range(first, first + count):
            is_read = is_read or mixture.choices[token, 0] >= 0
        if is_read:
            units[num_units, 0], units[num_units, 1], units[num_units, 2] = -1, first, count
            num_units += 1
    counts[1] = num_units - counts[0]


# Products


@jit.compiled
def _num_blocks(num_tokens: int, mixture: MixtureState) -> int:
    return (num_tokens + mixture.tokens_per_block - 1) // mixture.tokens_per_block


@jit.compiled
def _network(
    expert: int, first: int, layer: int, num_tokens: int, weights: PackedWeights, mixture: MixtureState
) -> tuple[int, int]:
    """The groups of a row of a network's inputs to `down`, and which of all is the first one of row `first`."""
    groups = mixture.intermediate // GROUP
    if expert >= 0:
        return groups, first * groups
    width = weights.layer_options[layer, WIDTH] // GROUP
    return width, num_tokens * mixture.top_k * groups + first * width


@jit.compiled
def _num_gate_pieces(block: int, layer: int, weights: PackedWeights, mixture: MixtureState) -> int:
    counts = mixture.num_units[layer, block]
    return int(counts[0] * mixture.intermediate + counts[1] * weights.layer_options[layer, WIDTH]) // GROUP


@jit.compiled
def num_gate_pieces(layer: int, num_tokens: int, weights: PackedWeights, mixture: MixtureState) -> int:
    count = 0
    for block in range(_num_blocks(num_tokens, mixture)):
        count += _num_gate_pieces(block, layer, weights, mixture)
    return count


@jit.compiled
def gate(
    piece: int,
    layer: int,
    num_tokens: int,
    shape: Shape,
    weights: PackedWeights,
    mixture: MixtureState,
    work: Activations,
    products: Float32Array,
    worker: int,
) -> None:
    """gate(gates) * up of a unit for one group of its network, made int8 at once. Units' pieces are neighbours."""
    block = 0
    while piece >= _num_gate_pieces(block, layer, weights, mixture):
        piece -= _num_gate_pieces(block, layer, weights, mixture)
        block += 1
    of_expert, of_experts = mixture.intermediate // GROUP, mixture.num_units[layer, block, 0]
    unit = piece // of_expert
    if unit >= of_experts:
        piece -= of_experts * of_expert
        unit = of_experts + piece // (weights.layer_options[layer, WIDTH] // GROUP)
    expert, first, rows = mixture.units[block, unit]
    num_groups, to = _network(expert, first, layer, num_tokens, weights, mixture)
    group, tiles = piece % num_groups, num_groups * OUTPUT_TILES
    address, weight_format = weights.matrices[layer, EXPERTS_GATE_UP if expert >= 0 else GATE_UP]
    x, row = hidden(work), first
    if expert >= 0 and rows == 1:
        row = mixture.tokens[first]
    elif expert >= 0:
        x, row = _gathered(layer * mixture.tokens.shape[0] + first, first, rows, mixture, work, worker), 0
    size = TOKENS_PER_PIECE * _COLUMNS
    tile, gates, ups = max(expert, 0) * 2 * tiles + group * OUTPUT_TILES, products[:size], products[size : 2 * size]
    for at, out in ((tile, gates), (tile + tiles, ups)):
        dot(address, weight_format, at, OUTPUT_TILES, x, row, rows, simd.address(out), _COLUMNS)
    let_through(gates[: rows * _COLUMNS], ups[: rows * _COLUMNS], shape.gate)
    for i in range(rows):
        at = simd.address(gates) + simd.FLOAT_BYTES * _COLUMNS * i
        quantize_groups(at, 1, *_addresses(fed(work), to + i * num_groups + group))


@jit.compiled
def _addresses(x: Quantized, group: int) -> tuple[int, int, int]:
    """Of a group's integers, scale and sum; groups of all rows are counted on, however wide these are."""
    floats = simd.FLOAT_BYTES * group
    return simd.address(x.integers) + GROUP * group, simd.address(x.scales) + floats, simd.address(x.sums) + floats


@jit.compiled
def _gathered(unit: int, first: int, rows: int, mixture: MixtureState, work: Activations, worker: int) -> Quantized:
    """The rows of a unit's tokens, one after the other; unit: a number that no other unit of the step has."""
    integers, scales = mixture.gathered_integers[worker], mixture.gathered_scales[worker]
    sums = mixture.gathered_sums[worker]
    if mixture.gathered[worker] != unit:
        mixture.gathered[worker] = unit
        for row in range(rows):
            token = mixture.tokens[first + row]
            for i in range(integers.shape[1]):
                integers[row, i] = work.hidden_integers[token, i]
            for i in range(scales.shape[1]):
                scales[row, i], sums[row, i] = work.hidden_scales[token, i], work.hidden_sums[token, i]
    return Quantized(integers, scales, sums)


@jit.compiled
def num_down_pieces(num_tokens: int, shape: Shape, mixture: MixtureState) -> int:
    return _num_blocks(num_tokens, mixture) * (shape.hidden // _COLUMNS)


@jit.compiled
def project_down(
    piece: int,
    layer: int,
    num_tokens: int,
    shape: Shape,
    weights: PackedWeights,
    mixture: MixtureState,
    work: Activations,
    worker: int,
) -> None:
    """32 outputs of all that a block's tokens go through, added to the stream; or the addend, where that is normalised.

    All experts' in one piece, so that pieces are alike however tokens have chosen, and no result leaves the worker.
    """
    columns = shape.hidden // _COLUMNS
    block, tile = piece // columns, piece % columns * OUTPUT_TILES
    start = block * mixture.tokens_per_block
    tokens = min(mixture.tokens_per_block, num_tokens - start)
    results, bytes_each = mixture.results[worker], simd.FLOAT_BYTES * _COLUMNS
    for unit in range(mixture.num_units[layer, block, 0] + mixture.num_units[layer, block, 1]):
        expert, first, rows = mixture.units[block, unit]
        num_groups, group = _network(expert, first, layer, num_tokens, weights, mixture)
        address, weight_format = weights.matrices[layer, EXPERTS_DOWN if expert >= 0 else DOWN]
        at = max(expert, 0) * (shape.hidden // TILE) + tile
        w = address + at * tile_bytes(weight_format, num_groups)
        place = first - start * mixture.top_k if expert >= 0 else tokens * mixture.top_k + first - start
        x, scales, sums = _addresses(fed(work), group)
        out = simd.address(results) + bytes_each * place
        dot_tiles(weight_format, x, rows, scales, sums, w, OUTPUT_TILES, num_groups, out, _COLUMNS)
    total = results[tokens * (mixture.top_k + 1) * _COLUMNS :][:_COLUMNS]
    for token in range(start, start + tokens):
        if mixture.choices[token, 0] >= 0:
            _add(token, token - start, tokens, layer, weights, mixture, results, total)
            _put(total, tile * TILE, token, weights, work)


@jit.compiled
def _add(
    token: int,
    row: int,
    tokens: int,
    layer: int,
    weights: PackedWeights,
    mixture: MixtureState,
    results: Float32Array,
    total: Float32Array,
) -> None:
    """total = the results of row `row` of a block of so many tokens, each times its weight."""
    k, target, start = mixture.top_k, simd.address(total), simd.address(results)
    total[:] = _ZERO
    for choice in range(k if weights.matrices[layer, ROUTER, 0] != 0 else 0):
        at = start + simd.FLOAT_BYTES * _COLUMNS * mixture.places[token, choice]
        simd.blend(at, mixture.weights[token, choice], target, _ONE, _COLUMNS)
    if weights.layer_options[layer, WIDTH] > 0:
        at = start + simd.FLOAT_BYTES * _COLUMNS * (tokens * k + row)
        simd.blend(at, mixture.weights[token, k], target, _ONE, _COLUMNS)


@jit.compiled
def _put(total: Float32Array, column: int, token: int, weights: PackedWeights, work: Activations) -> None:
    if has_extra(weights, FEED_FORWARD_NORM):
        work.addend[token, column : column + _COLUMNS] = total
    else:
        simd.blend(simd.address(total), _ONE, simd.address(work.stream[token, column:]), _ONE, _COLUMNS)
