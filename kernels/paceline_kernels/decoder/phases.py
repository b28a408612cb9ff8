"""The phases of a decoder step, each cut into pieces that do not depend on each other.

Knows what one piece computes. Who does it, and when, is `cpu`'s.

Every output of a piece depends on one token's inputs alone, and is computed in an order that `quantized_linear.tiles`,
`simd` and `attention.cpu` fix; how a phase is cut changes who computes it, never its bits.
"""

import numpy as np

from paceline_kernels.activation.cpu import SILU, gelu_tanh, silu
from paceline_kernels.attention import cpu as attention
from paceline_kernels.attention import int8, units
from paceline_kernels.compiler import jit
from paceline_kernels.decoder import phase_pool
from paceline_kernels.decoder.state import (
    ATTENTION_NORM,
    ATTENTION_OUTPUT,
    DOWN,
    DOWN_BIAS,
    FEED_FORWARD_NORM,
    GATE_UP,
    GATE_UP_BIAS,
    KEY_NORM,
    OUTPUT_BIAS,
    QKV,
    QKV_BIAS,
    QUERY_NORM,
    ROPE_TABLE,
    WINDOW,
    Activations,
    AttentionSplits,
    Batch,
    Float32Array,
    Int32Array,
    MixtureState,
    PackedWeights,
    Quantized,
    Shape,
    attended,
    extra,
    fed,
    has_extra,
    has_orders,
    hidden,
)
from paceline_kernels.quantized_linear.cpu import dot_tiles, quantize_groups, tile_bytes, unpack_row
from paceline_kernels.quantized_linear.packing import GROUP, TILE
from paceline_kernels.rms_norm.cpu import normalize_row
from paceline_kernels.rope.cpu import rotate
from paceline_kernels.vector import simd
from paceline_kernels.vector.elementary import tanh

# Tokens of a piece of a product: their int8 inputs and the weights of a piece stay in a second-level cache.
TOKENS_PER_PIECE = 64
# Tokens of a piece of a norm.
TOKENS_PER_NORM = 4
# Outputs of a piece, in tiles of 16: two are one group of what comes next.
OUTPUT_TILES = 2
LOGIT_TILES = 4


@jit.compiled
def num_blocks(num_tokens: int) -> int:
    """How many pieces the tokens of a product make."""
    return (num_tokens + TOKENS_PER_PIECE - 1) // TOKENS_PER_PIECE


@jit.compiled
def is_wanted(first: int, count: int, batch: Batch) -> bool:
    """Whether anybody wants logits of one of these tokens."""
    num_wanted = 0
    for token in batch.logit_tokens:
        num_wanted += first <= token < first + count
    return num_wanted > 0


@jit.compiled
def dot(
    address: int,
    weight_format: int,
    tile: int,
    num_tiles: int,
    x: Quantized,
    first: int,
    rows: int,
    out: int,
    out_stride: int,
) -> None:
    """out[:rows, 16 * i + j] = rows `first`… of x times output j of the tiles from `tile` on; out is an address."""
    num_groups = x.scales.shape[1]
    inputs = (simd.address(x.integers[first]), rows, simd.address(x.scales[first]), simd.address(x.sums[first]))
    w = address + tile * tile_bytes(weight_format, num_groups)
    dot_tiles(weight_format, *inputs, w, num_tiles, num_groups, out, out_stride)


@jit.compiled
def _quantize(x: int, num_groups: int, out: Quantized, row: int, first_group: int) -> None:
    """Make the floats at address x int8 as groups `first_group`… of a row of `out`."""
    group = row * out.scales.shape[1] + first_group
    quantize_groups(
        x,
        num_groups,
        simd.address(out.integers) + GROUP * group,
        simd.address(out.scales) + simd.FLOAT_BYTES * group,
        simd.address(out.sums) + simd.FLOAT_BYTES * group,
    )


@jit.compiled
def _normalize(
    x: Float32Array, norm: Float32Array, eps: jit.Float32, row: int, work: Activations, normalized: Float32Array
) -> None:
    """hidden[row] = x, normalised; `normalized` is memory for it, and may be x."""
    normalize_row(x, norm, eps, normalized)
    _quantize(simd.address(normalized), x.shape[0] // GROUP, hidden(work), row, 0)


@jit.compiled
def _normalize_in_order(
    norm: int,
    token: int,
    shape: Shape,
    weights: PackedWeights,
    work: Activations,
    normalized: Float32Array,
    reordered: Float32Array,
) -> None:
    """hidden[token] = its stream, normalised with norm `norm`, as the matrix behind it takes its inputs."""
    _normalize(work.stream[token], weights.norms[norm], shape.eps, token, work, normalized)
    if has_orders(weights):
        start = 0 if norm % 2 == 0 else weights.orders.shape[1] - shape.hidden
        _take(normalized, weights.orders[norm // 2, start : start + shape.hidden], reordered)
        _quantize(simd.address(reordered), shape.hidden // GROUP, hidden(work), token, 0)


@jit.compiled
def _take(x: Float32Array, order: Int32Array, out: Float32Array) -> None:
    for i in range(order.shape[0]):
        out[i] = x[order[i]]


@jit.compiled
def reorder(
    piece: int,
    layer: int,
    num_tokens: int,
    shape: Shape,
    weights: PackedWeights,
    work: Activations,
    reordered: Float32Array,
) -> None:
    """What some tokens attended to, as the matrix behind it takes its inputs."""
    width = shape.num_heads * shape.head_dim
    for token in range(piece * TOKENS_PER_NORM, min(num_tokens, (piece + 1) * TOKENS_PER_NORM)):
        order = weights.orders[layer, shape.hidden : shape.hidden + width]
        _take(work.attended[token].reshape(-1), order, reordered)
        _quantize(simd.address(reordered), width // GROUP, attended(work), token, 0)


@jit.compiled
def _add_normalized(
    stream: Float32Array, addend: Float32Array, norm: Float32Array, eps: jit.Float32, out: Float32Array
) -> None:
    """out = the stream of a token and what is to be added to it, normalised before."""
    normalize_row(addend, norm, eps, out)
    for i in range(out.shape[0]):
        out[i] += stream[i]


@jit.compiled
def _scale(x: Float32Array, factor: jit.Float32) -> None:
    """x *= factor."""
    for i in range(x.shape[0]):
        x[i] *= factor


@jit.compiled
def embed(
    piece: int,
    shape: Shape,
    weights: PackedWeights,
    batch: Batch,
    work: Activations,
    normalized: Float32Array,
    reordered: Float32Array,
) -> None:
    """The tokens' embeddings begin the stream; the first norm follows at once."""
    for token in range(piece * TOKENS_PER_NORM, min(batch.token_ids.shape[0], (piece + 1) * TOKENS_PER_NORM)):
        unpack_row(weights.embedding, weights.embedding_format, batch.token_ids[token], work.stream[token])
        if shape.embedding_scale != 1:
            _scale(work.stream[token], shape.embedding_scale)
        _normalize_in_order(0, token, shape, weights, work, normalized, reordered)


@jit.compiled
def normalize(
    piece: int,
    norm: int,
    num_tokens: int,
    shape: Shape,
    weights: PackedWeights,
    mixture: MixtureState | None,
    work: Activations,
    normalized: Float32Array,
    reordered: Float32Array,
) -> None:
    """The stream of some tokens, normalised with norm `norm`, which is not the first. A router finds it as `addend`."""
    layer, part = (norm - 1) // 2, ATTENTION_NORM + (norm - 1) % 2
    for token in range(piece * TOKENS_PER_NORM, min(num_tokens, (piece + 1) * TOKENS_PER_NORM)):
        if has_extra(weights, part):
            post_norm = extra(weights, layer, part)
            _add_normalized(work.stream[token], work.addend[token], post_norm, shape.eps, normalized)
            for i in range(shape.hidden):
                work.stream[token, i] = normalized[i]
        _normalize_in_order(norm, token, shape, weights, work, normalized, reordered)
        if mixture is not None:
            for i in range(shape.hidden):
                work.addend[token, i] = normalized[i]


@jit.compiled
def copy_aux(piece: int, layer: int, batch: Batch, work: Activations) -> None:
    """The stream of some tokens, where somebody wants what flows into `layer`."""
    for place in range(batch.aux_layers.shape[0]):
        if batch.aux_layers[place] == layer:
            for token in range(piece * TOKENS_PER_NORM, min(batch.token_ids.shape[0], (piece + 1) * TOKENS_PER_NORM)):
                for i in range(work.stream.shape[1]):
                    batch.aux_states[token, place, i] = work.stream[token, i]


@jit.compiled
def normalize_last(
    piece: int, shape: Shape, weights: PackedWeights, batch: Batch, work: Activations, normalized: Float32Array
) -> None:
    """The same with the last norm, for the tokens whose logits are wanted, row after row.

    The stream stays as it is, because a token may be wanted more than once.
    """
    norm = weights.norms[2 * shape.num_layers]
    for row in range(piece * TOKENS_PER_NORM, min(batch.logit_tokens.shape[0], (piece + 1) * TOKENS_PER_NORM)):
        token = batch.logit_tokens[row]
        x = work.stream[token]
        if has_extra(weights, FEED_FORWARD_NORM):
            post_norm = extra(weights, shape.num_layers - 1, FEED_FORWARD_NORM)
            _add_normalized(x, work.addend[token], post_norm, shape.eps, normalized)
            x = normalized
        _normalize(x, norm, shape.eps, row, work, normalized)


@jit.compiled
def _store_key(x: Float32Array, cache: attention.Cache, block: int, head: int, offset: int) -> None:
    """Put a head's key into its slot, in the way the cache keeps it; x may be spoilt."""
    if cache.itemsize == 1:
        int8.store_key(x, cache, block, head, offset)
    else:
        simd.narrow(simd.address(x), x.shape[0], simd.address(cache[block, head, offset]))


@jit.compiled
def _store_value(x: Float32Array, cache: attention.Cache, block: int, head: int, offset: int) -> None:
    if cache.itemsize == 1:
        int8.store_value(x, cache, block, head, offset)
    else:
        simd.narrow(simd.address(x), x.shape[0], simd.address(cache[block, head, offset]))


@jit.compiled
def _add(x: Float32Array, bias: Float32Array) -> None:
    for i in range(x.shape[0]):
        x[i] += bias[i]


@jit.compiled
def project_qkv(
    piece: int,
    layer: int,
    shape: Shape,
    weights: PackedWeights,
    batch: Batch,
    keys: attention.Cache,
    values: attention.Cache,
    mixture: MixtureState | None,
    work: Activations,
    scratch: Float32Array,
) -> None:
    """One head of some tokens: queries rotated, keys rotated and stored, or values stored; caches of one layer.

    Where norms span heads, who finishes the last head of these tokens normalises, rotates and stores all of them.
    """
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    blocks = num_blocks(batch.token_ids.shape[0])
    first, head = piece % blocks * TOKENS_PER_PIECE, piece // blocks
    rows = min(TOKENS_PER_PIECE, batch.token_ids.shape[0] - first)
    projected = scratch[: TOKENS_PER_PIECE * head_dim].reshape((TOKENS_PER_PIECE, head_dim))
    address, weight_format = weights.matrices[layer, QKV]
    tiles = head_dim // TILE
    dot(address, weight_format, head * tiles, tiles, hidden(work), first, rows, simd.address(projected), head_dim)
    block_size, norm = keys.shape[2], QUERY_NORM if head < num_heads else KEY_NORM
    spans = False
    if mixture is not None:
        spans = bool(weights.extra_starts[QUERY_NORM + 1] - weights.extra_starts[QUERY_NORM] > head_dim)
    is_normalized = has_extra(weights, norm) and head < num_heads + num_kv_heads and not spans
    table = weights.rope_tables[weights.layer_options[layer, ROPE_TABLE]]
    for row in range(rows):
        token = first + row
        block, offset = batch.slots[token] // block_size, batch.slots[token] % block_size
        angles = table[batch.positions[token]]
        if has_extra(weights, QKV_BIAS):
            _add(projected[row], extra(weights, layer, QKV_BIAS)[head * head_dim :])
        if is_normalized:
            normalize_row(projected[row], extra(weights, layer, norm), shape.eps, projected[row])
        if spans and head < num_heads + num_kv_heads:
            kept = work.query[token, head] if head < num_heads else work.attended[token, head - num_heads]
            for i in range(head_dim):
                kept[i] = projected[row, i]
        elif head < num_heads:
            rotate(projected[row], angles, work.query[token, head])
        elif head < num_heads + num_kv_heads:
            rotate(projected[row], angles, projected[row])
            _store_key(projected[row], keys, block, head - num_heads, offset)
        else:
            _store_value(projected[row], values, block, head - num_heads - num_kv_heads, offset)
    if mixture is not None:
        is_last = spans and phase_pool.finish(mixture.counters, piece % blocks, 1) + 1 == num_heads + 2 * num_kv_heads
        if is_last:
            phase_pool.reset(mixture.counters, piece % blocks)
            _finish_heads(first, rows, layer, shape, weights, batch, keys, table, work)


@jit.compiled
def _finish_heads(
    first: int,
    rows: int,
    layer: int,
    shape: Shape,
    weights: PackedWeights,
    batch: Batch,
    keys: attention.Cache,
    table: Float32Array,
    work: Activations,
) -> None:
    """Norms over all heads of some tokens. Their keys lie where later is what they attend to."""
    query_norm, key_norm = extra(weights, layer, QUERY_NORM), extra(weights, layer, KEY_NORM)
    for token in range(first, first + rows):
        queries, new_keys = work.query[token], work.attended[token]
        flat_queries, flat_keys = queries.reshape(-1), new_keys.reshape(-1)[: key_norm.shape[0]]
        normalize_row(flat_queries, query_norm, shape.eps, flat_queries)
        normalize_row(flat_keys, key_norm, shape.eps, flat_keys)
        block, offset = batch.slots[token] // keys.shape[2], batch.slots[token] % keys.shape[2]
        angles = table[batch.positions[token]]
        for head in range(shape.num_heads):
            rotate(queries[head], angles, queries[head])
        for head in range(shape.num_kv_heads):
            rotate(new_keys[head], angles, new_keys[head])
            _store_key(new_keys[head], keys, block, head, offset)


@jit.compiled
def scoring(layer: int, shape: Shape, weights: PackedWeights) -> attention.Scoring:
    return attention.Scoring(shape.attention_scale, shape.attention_softcap, weights.layer_options[layer, WINDOW])


@jit.compiled
def unit_of(piece: int, shape: Shape, splits: AttentionSplits) -> int:
    """The unit of a piece of attention. The last ones of a chunk see most positions: they are begun first."""
    return int(splits.num_units - 1 - piece // shape.num_kv_heads)


@jit.compiled
def attend(
    piece: int,
    shape: Shape,
    weights: PackedWeights,
    batch: Batch,
    keys: attention.Cache,
    values: attention.Cache,
    rules: attention.Scoring,
    splits: AttentionSplits,
    folds: phase_pool.Counters,
    work: Activations,
    scratch: attention.Scratch,
) -> None:
    """One unit of attention for one KV head; who finishes the last segment of a split row folds its segments."""
    num_kv_heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
    unit, head = splits.units[unit_of(piece, shape, splits)], piece % num_kv_heads
    row, token = unit[units.ROW], unit[units.TOKEN]
    position = batch.context_lens[row] - (batch.cu_seqlens[row + 1] - token)
    flat = work.query.reshape(-1)
    stride = shape.num_heads * shape.head_dim
    partials = attention.Partials(splits.max, splits.sum, splits.sums)
    table, out = batch.block_tables[row], work.attended
    attention.do_unit(unit, head, position, flat, stride, keys, values, table, rules, scratch, partials, out)
    if unit[units.IS_SPLIT] == 1:
        first, end = splits.first_partial[row], splits.first_partial[row + 1]
        fold = row * num_kv_heads + head
        if phase_pool.finish(folds, fold, 1) + 1 < end - first:
            return
        phase_pool.reset(folds, fold)
        first += units.first_segment(position, rules.window, scratch.scores.shape[1])
        attention.fold_partials(first, end, head * group, (head + 1) * group, partials, out[token])
    if has_orders(weights):
        return
    groups_per_head = shape.head_dim // GROUP
    for i in range(token, token + unit[units.NUM_TOKENS]):
        for query_head in range(head * group, (head + 1) * group):
            at = simd.address(out[i, query_head])
            _quantize(at, groups_per_head, attended(work), i, query_head * groups_per_head)


@jit.compiled
def _add_product(
    piece: int,
    address: int,
    weight_format: int,
    x: Quantized,
    num_tokens: int,
    keeps: bool,
    out: Float32Array,
    scratch: Float32Array,
) -> None:
    """x times a matrix, for some tokens and 32 outputs: out += that, or = that where `keeps` is False."""
    width, blocks = OUTPUT_TILES * TILE, num_blocks(num_tokens)
    first, column = piece % blocks * TOKENS_PER_PIECE, piece // blocks * width
    rows = min(TOKENS_PER_PIECE, num_tokens - first)
    products = scratch[: TOKENS_PER_PIECE * width].reshape((TOKENS_PER_PIECE, width))
    dot(address, weight_format, column // TILE, OUTPUT_TILES, x, first, rows, simd.address(products), width)
    if not keeps:
        for row in range(rows):
            for i in range(width):
                out[first + row, column + i] = np.float32(0.0)
    one = np.float32(1.0)
    for row in range(rows):
        simd.blend(simd.address(products[row]), one, simd.address(out[first + row, column:]), one, width)


@jit.compiled
def _add_bias(piece: int, bias: Float32Array, num_tokens: int, out: Float32Array) -> None:
    width, blocks = OUTPUT_TILES * TILE, num_blocks(num_tokens)
    first, column = piece % blocks * TOKENS_PER_PIECE, piece // blocks * width
    for token in range(first, min(first + TOKENS_PER_PIECE, num_tokens)):
        for i in range(column, column + width):
            out[token, i] += bias[i]


@jit.compiled
def project_output(
    piece: int, layer: int, num_tokens: int, weights: PackedWeights, work: Activations, scratch: Float32Array
) -> None:
    """What was attended to, added to the stream; where that is normalised first, it becomes the addend."""
    address, weight_format = weights.matrices[layer, ATTENTION_OUTPUT]
    is_normalized = has_extra(weights, ATTENTION_NORM)
    out = work.addend if is_normalized else work.stream
    _add_product(piece, address, weight_format, attended(work), num_tokens, not is_normalized, out, scratch)
    if has_extra(weights, OUTPUT_BIAS):
        _add_bias(piece, extra(weights, layer, OUTPUT_BIAS), num_tokens, out)


@jit.compiled
def let_through(gates: Float32Array, ups: Float32Array, kind: int) -> None:
    """gates = gate(gates) * ups."""
    if kind == SILU:
        for i in range(gates.shape[0]):
            gates[i] = silu(gates[i]) * ups[i]
    else:
        for i in range(gates.shape[0]):
            gates[i] = gelu_tanh(gates[i]) * ups[i]


@jit.compiled
def gate(
    piece: int,
    layer: int,
    num_tokens: int,
    shape: Shape,
    weights: PackedWeights,
    work: Activations,
    scratch: Float32Array,
) -> None:
    """gate(gates) * up of some tokens for one group of the feed-forward network, made int8 at once."""
    width, blocks = OUTPUT_TILES * TILE, num_blocks(num_tokens)
    first, group = piece % blocks * TOKENS_PER_PIECE, piece // blocks
    rows = min(TOKENS_PER_PIECE, num_tokens - first)
    size = TOKENS_PER_PIECE * width
    gates, ups = scratch[:size].reshape((-1, width)), scratch[size : 2 * size].reshape((-1, width))
    address, weight_format = weights.matrices[layer, GATE_UP]
    dot(
        address,
        weight_format,
        group * OUTPUT_TILES,
        OUTPUT_TILES,
        hidden(work),
        first,
        rows,
        simd.address(gates),
        width,
    )
    tile = shape.intermediate // TILE + group * OUTPUT_TILES
    dot(address, weight_format, tile, OUTPUT_TILES, hidden(work), first, rows, simd.address(ups), width)
    if has_extra(weights, GATE_UP_BIAS):
        bias = extra(weights, layer, GATE_UP_BIAS)
        for row in range(rows):
            _add(gates[row], bias[group * width :])
            _add(ups[row], bias[shape.intermediate + group * width :])
    let_through(scratch[: rows * width], scratch[size : size + rows * width], shape.gate)
    for row in range(rows):
        _quantize(simd.address(gates) + simd.FLOAT_BYTES * width * row, 1, fed(work), first + row, group)


@jit.compiled
def project_down(
    piece: int, layer: int, num_tokens: int, weights: PackedWeights, work: Activations, scratch: Float32Array
) -> None:
    """What the gates let through, likewise."""
    address, weight_format = weights.matrices[layer, DOWN]
    is_normalized = has_extra(weights, FEED_FORWARD_NORM)
    out = work.addend if is_normalized else work.stream
    _add_product(piece, address, weight_format, fed(work), num_tokens, not is_normalized, out, scratch)
    if has_extra(weights, DOWN_BIAS):
        _add_bias(piece, extra(weights, layer, DOWN_BIAS), num_tokens, out)


@jit.compiled
def num_logit_pieces(weights: PackedWeights) -> int:
    return int((weights.lm_head.shape[0] + LOGIT_TILES - 1) // LOGIT_TILES)


@jit.compiled
def project_logits(piece: int, num_logits: int, shape: Shape, weights: PackedWeights, work: Activations) -> None:
    """The logits of some rows for 64 tokens of the vocabulary."""
    blocks = num_blocks(num_logits)
    first, tile = piece % blocks * TOKENS_PER_PIECE, piece // blocks * LOGIT_TILES
    rows, tiles = min(TOKENS_PER_PIECE, num_logits - first), min(LOGIT_TILES, weights.lm_head.shape[0] - tile)
    stride = work.logits.shape[1]
    out = simd.address(work.logits) + simd.FLOAT_BYTES * (first * stride + tile * TILE)
    address = simd.address(weights.lm_head)
    dot(address, weights.lm_head_format, tile, tiles, hidden(work), first, rows, out, stride)
    if shape.logit_softcap > 0:
        for row in range(first, first + rows):
            for column in range(tile * TILE, (tile + tiles) * TILE):
                work.logits[row, column] = shape.logit_softcap * tanh(work.logits[row, column] / shape.logit_softcap)
