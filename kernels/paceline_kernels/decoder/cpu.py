"""decoder for CPUs: one compiled call per step, one parallel region, all layers.

Knows the order of phases and where memory comes from. What a phase computes is `phases`' affair, how workers share it
`phase_pool`'s.
"""

import numba
import numpy as np
import torch
from numba import types

from paceline_kernels.attention import cpu as attention
from paceline_kernels.attention import units
from paceline_kernels.compiler import jit
from paceline_kernels.compiler.borrowed_arrays import borrowed
from paceline_kernels.compiler.extern_calls import called_by_name, linked_to
from paceline_kernels.decoder import expert_phases, phase_pool, phases
from paceline_kernels.decoder.state import (
    Activations,
    AttentionSplits,
    Batch,
    Float32Array,
    Int32Array,
    Int64Array,
    MixtureState,
    PackedWeights,
    Shape,
    has_orders,
    new_activations,
    new_splits,
)
from paceline_kernels.decoder.times import PhaseTime, phase_times
from paceline_kernels.decoder.weights import AuxHidden, DecoderBatch, DecoderLayer, DecoderWeights
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.quantized_linear.packing import TILE

# What follows each other: once, for every layer, once. `NORMALIZE` after the last layer is for the logits.
_EMBED, _QKV, _ATTEND, _REORDER, _OUTPUT, _NORMALIZE, _ROUTE, _GATE, _DOWN, _NORMALIZE_NEXT, _LOGITS = range(11)
_PHASES_PER_LAYER = 9
# numba computes with no float16: compiled code sees the bits.
_ARRAYS: dict[torch.dtype, type[np.generic]] = {torch.float16: np.uint16, torch.int8: np.int8}
# For products, a normalised row, the same in another order, attention, and when phases ended.
_Memory = tuple[Float32Array, Float32Array, Float32Array, attention.Scratch, Int64Array]


class CpuDecoder:
    """See `paceline_kernels.decoder.Decoder`. Holds the weights, and memory for the largest step so far."""

    def __init__(self, weights: DecoderWeights) -> None:
        self._kept = weights  # compiled code knows the matrices by address only
        self._shape = _shape(weights)
        self._weights = _compiled_weights(weights)
        self._vocab_columns = self._weights.lm_head.shape[0] * TILE
        self._activations = new_activations(self._shape, 1, 1, self._vocab_columns)
        self._mixture = self._new_mixture(1)
        self._splits = new_splits(self._shape, 1, 1, 1)
        num_phases = 2 + _PHASES_PER_LAYER * self._shape.num_layers
        self._counters = phase_pool.new_counters(num_phases)
        self._times = np.zeros((num_phases + 1, 2), dtype=np.int64)
        self._folds = phase_pool.new_counters(self._shape.num_kv_heads)

    def forward(
        self,
        batch: DecoderBatch,
        keys: torch.Tensor,
        values: torch.Tensor,
        aux: AuxHidden | None,
        times: list[PhaseTime] | None,
    ) -> torch.Tensor:
        aux = aux or AuxHidden((), torch.empty(0, 0, 0))
        compiled_batch = Batch(
            batch.token_ids.numpy(),
            batch.positions.numpy(),
            batch.slot_mapping.numpy(),
            batch.cu_seqlens.numpy(),
            batch.context_lens.numpy(),
            batch.block_tables.numpy(),
            batch.logit_tokens.numpy(),
            np.array(aux.layers, dtype=np.int64),
            aux.states.numpy(),
        )
        _check_batch(compiled_batch, self._kept, keys)
        caches = (keys.numpy().view(_ARRAYS[keys.dtype]), values.numpy().view(_ARRAYS[values.dtype]))
        splits = self._cut(compiled_batch, keys.shape[3])
        self._make_room(compiled_batch)
        self._counters[:] = 0
        if self._mixture is not None:
            self._mixture.gathered[:] = -1
        run(
            self._shape,
            self._weights,
            self._mixture,
            compiled_batch,
            *caches,
            self._activations,
            splits,
            self._counters,
            self._folds,
            self._times if times is not None else self._times[:0],
            jit.num_threads(),
        )
        if times is not None:
            times += phase_times(self._times, self._kept, batch, keys, self._num_read(batch.token_ids.shape[0]))
        num_logits = compiled_batch.logit_tokens.shape[0]
        logits = torch.from_numpy(self._activations.logits[:num_logits])
        return logits[:, : self._shape.vocab].contiguous()

    def _num_read(self, num_tokens: int) -> Int64Array | None:
        """How many experts each layer read in the last step, which had so many tokens; None without a mixture."""
        if self._mixture is None:
            return None
        num_blocks = -(-num_tokens // self._mixture.tokens_per_block)
        chosen: Int64Array = self._mixture.num_units[:, :num_blocks, 2].sum(axis=1)
        return chosen

    def tokens_of_experts(self, layer: int, num_tokens: int) -> Int64Array:
        assert self._mixture is not None
        ends = self._mixture.next_places[layer, : -(-num_tokens // self._mixture.tokens_per_block)]
        tokens: Int64Array = np.diff(ends, prepend=0).sum(axis=0)
        return tokens

    def _cut(self, batch: Batch, block_size: int) -> AttentionSplits:
        """How attention is shared out in this batch."""
        group = self._shape.num_heads // self._shape.num_kv_heads
        tile = (units.tile_tokens(group), units.segment_positions(block_size))
        num_units, num_partials = units.count_units(batch.cu_seqlens, batch.context_lens, *tile)
        num_rows, splits = batch.context_lens.shape[0], self._splits
        room = (splits.first_partial.shape[0] - 1, splits.units.shape[0], splits.max.shape[0])
        if any(has < needs for has, needs in zip(room, (num_rows, num_units, num_partials), strict=True)):
            needed = (num_rows, num_units, num_partials)
            self._splits = new_splits(self._shape, *(max(has, 2 * n) for has, n in zip(room, needed, strict=True)))
            self._folds = phase_pool.new_counters((self._splits.first_partial.shape[0] - 1) * self._shape.num_kv_heads)
        splits = self._splits
        units.fill_units(batch.cu_seqlens, batch.context_lens, *tile, splits.units, splits.first_partial)
        return splits._replace(num_units=num_units)

    def _make_room(self, batch: Batch) -> None:
        room = (self._activations.stream.shape[0], self._activations.logits.shape[0])
        num_logits = batch.logit_tokens.shape[0]
        needed = (max(batch.token_ids.shape[0], num_logits), num_logits)  # what is normalised last is a row per logit
        if any(has < needs for has, needs in zip(room, needed, strict=True)):
            num_tokens, num_logits = (
                has if has >= needs else 2 * needs for has, needs in zip(room, needed, strict=True)
            )
            self._activations = new_activations(self._shape, num_tokens, num_logits, self._vocab_columns)
            self._mixture = self._new_mixture(num_tokens)

    def _new_mixture(self, num_tokens: int) -> MixtureState | None:
        experts = self._kept.experts
        if experts is None:
            return None
        return expert_phases.new_mixture(experts.routing, experts.down.num_inputs, self._shape, num_tokens)


def _shape(weights: DecoderWeights) -> Shape:
    return Shape(
        num_layers=len(weights.layers),
        hidden=weights.embedding.num_inputs,
        intermediate=weights.intermediate_size,
        num_heads=weights.num_heads,
        num_kv_heads=weights.num_kv_heads,
        head_dim=weights.head_dim,
        vocab=weights.embedding.num_outputs,
        eps=np.float32(weights.rms_norm_eps),
        gate=int(weights.gate),
        embedding_scale=np.float32(weights.embedding_scale),
        attention_scale=np.float32(weights.attention_scale or weights.head_dim**-0.5),
        attention_softcap=np.float32(weights.attention_softcap or 0.0),
        logit_softcap=np.float32(weights.logit_softcap or 0.0),
    )


def _compiled_weights(weights: DecoderWeights) -> PackedWeights:
    layers = weights.layers
    norms = [norm for layer in layers for norm in (layer.attention_norm, layer.feed_forward_norm)]
    extras = [_extras(layer) for layer in layers]
    options = [
        (layer.rope_table, attention.ALL_POSITIONS if layer.window is None else layer.window, layer.width)
        for layer in layers
    ]
    return PackedWeights(
        matrices=np.array([_addresses(layer) for layer in layers], dtype=np.int64),
        extras=np.stack([np.concatenate(vectors) for vectors in extras]),
        extra_starts=np.cumsum([0, *(len(vector) for vector in extras[0])], dtype=np.int64),
        norms=torch.stack([*norms, weights.final_norm]).numpy(),
        embedding=weights.embedding.data.numpy(),
        embedding_format=weights.embedding.code,
        lm_head=weights.lm_head.data.numpy(),
        lm_head_format=weights.lm_head.code,
        rope_tables=weights.rope_tables.numpy(),
        layer_options=np.array(options, dtype=np.int64),
        orders=_orders(weights),
    )


def _addresses(layer: DecoderLayer) -> list[tuple[int, int]]:
    """A layer's row of `PackedWeights.matrices`."""
    experts = layer.experts
    of_experts = (None, None) if experts is None else (experts.gate_up, experts.down)
    matrices = (layer.qkv, layer.attention_output, layer.gate_up, layer.down, *of_experts)
    vectors = (None, None, None) if experts is None else (experts.router, experts.bias, experts.shared_gate)
    router, bias, shared_gate = (0 if each is None else each.data_ptr() for each in vectors)
    packed = [(0, 0) if each is None else (each.data.data_ptr(), each.code) for each in matrices]
    return [*packed, (router, bias), (shared_gate, 0)]


def _orders(weights: DecoderWeights) -> Int32Array:
    if not weights.has_orders:
        return np.empty((0, 0), dtype=np.int32)
    return np.stack([_order_of_inputs(layer) for layer in weights.layers])


def _order_of_inputs(layer: DecoderLayer) -> Int32Array:
    hidden, attended = layer.qkv.num_inputs, layer.attention_output.num_inputs
    pairs = zip(layer.orders, (hidden, attended, hidden), strict=True)
    return np.concatenate(
        [np.arange(size, dtype=np.int32) if order is None else order.numpy() for order, size in pairs]
    )


def _extras(layer: DecoderLayer) -> list[Float32Array]:
    """The vectors that not every model has, in the order in which `state` names them."""
    heads, post = layer.head_norms, layer.post_norms
    vectors = (
        *(layer.qkv_bias, layer.attention_output_bias, layer.gate_up_bias, layer.down_bias),
        *((None, None) if heads is None else (heads.query, heads.key)),
        *((None, None) if post is None else (post.attention, post.feed_forward)),
    )
    return [np.empty(0, dtype=np.float32) if vector is None else vector.numpy() for vector in vectors]


def _check_batch(batch: Batch, weights: DecoderWeights, keys: torch.Tensor) -> None:
    """Compiled code checks nothing: every index is looked at here."""
    num_tokens = batch.token_ids.shape[0]
    bounds = (
        ("token ids", batch.token_ids, weights.embedding.num_outputs),
        ("positions", batch.positions, weights.rope_tables.shape[1]),
        ("slots", batch.slots, keys.shape[1] * keys.shape[3]),
        ("tokens whose logits are wanted", batch.logit_tokens, num_tokens),
    )
    for name, indices, end in bounds:
        if indices.size and not (indices.min() >= 0 and indices.max() < end):
            raise KernelArgumentError("decoder", f"{name} must be 0 to {end - 1}")
    if batch.cu_seqlens[-1] != num_tokens:
        raise KernelArgumentError("decoder", f"cu_seqlens must run from 0 to {num_tokens}")
    attention.check_rows(num_tokens, keys[0], batch.block_tables, batch.cu_seqlens, batch.context_lens, is_padded=True)


@jit.compiled
def _num_pieces(
    phase: int,
    layer: int,
    shape: Shape,
    weights: PackedWeights,
    mixture: MixtureState | None,
    batch: Batch,
    num_units: int,
) -> int:
    num_tokens, num_logits = int(batch.token_ids.shape[0]), int(batch.logit_tokens.shape[0])
    blocks, width = phases.num_blocks(num_tokens), phases.OUTPUT_TILES * TILE
    if phase == _QKV:
        return blocks * (shape.num_heads + 2 * shape.num_kv_heads)
    if phase == _ATTEND:
        return num_units * int(shape.num_kv_heads)
    if phase == _REORDER and not has_orders(weights):
        return 0
    if phase in (_ROUTE, _GATE, _DOWN):
        return _num_network_pieces(phase, layer, num_tokens, shape, weights, mixture)
    if phase == _OUTPUT:
        return blocks * (shape.hidden // width)
    if phase == _LOGITS:
        return phases.num_blocks(num_logits) * phases.num_logit_pieces(weights)
    is_last = phase == _NORMALIZE_NEXT and layer == shape.num_layers - 1
    normalized = num_logits if is_last else num_tokens
    return (normalized + phases.TOKENS_PER_NORM - 1) // phases.TOKENS_PER_NORM


@jit.compiled
def _num_network_pieces(
    phase: int, layer: int, num_tokens: int, shape: Shape, weights: PackedWeights, mixture: MixtureState | None
) -> int:
    if mixture is None:
        width = 0 if phase == _ROUTE else shape.intermediate if phase == _GATE else shape.hidden
        return phases.num_blocks(num_tokens) * (width // (phases.OUTPUT_TILES * TILE))
    if phase == _ROUTE:
        return expert_phases.num_route_pieces(layer, num_tokens, weights, mixture)
    if phase == _GATE:
        return expert_phases.num_gate_pieces(layer, num_tokens, weights, mixture)
    return expert_phases.num_down_pieces(num_tokens, shape, mixture)


@jit.compiled
def _is_read(
    phase: int, piece: int, shape: Shape, mixture: MixtureState | None, batch: Batch, splits: AttentionSplits
) -> bool:
    """Whether anyone reads what the last layer's piece makes: behind its keys and values only logits are made."""
    if mixture is not None and phase in (_ROUTE, _GATE, _DOWN):
        return True  # nobody is routed whom nobody reads
    if phase == _ATTEND:
        unit = splits.units[phases.unit_of(piece, shape, splits)]
        first, count = unit[units.TOKEN], unit[units.NUM_TOKENS]
    elif phase in (_OUTPUT, _GATE, _DOWN):
        block = piece % phases.num_blocks(batch.token_ids.shape[0])
        first, count = block * phases.TOKENS_PER_PIECE, phases.TOKENS_PER_PIECE
    elif phase in (_REORDER, _NORMALIZE):
        first, count = piece * phases.TOKENS_PER_NORM, phases.TOKENS_PER_NORM
    else:
        return True
    return phases.is_wanted(first, count, batch)


@jit.compiled
def _feed(
    phase: int,
    piece: int,
    layer: int,
    shape: Shape,
    weights: PackedWeights,
    mixture: MixtureState,
    batch: Batch,
    work: Activations,
    products: Float32Array,
    worker: int,
) -> None:
    """What goes through a mixture's networks."""
    num_tokens = batch.token_ids.shape[0]
    if phase == _ROUTE:
        expert_phases.route(piece, layer, shape, weights, mixture, batch, work)
    elif phase == _GATE:
        expert_phases.gate(piece, layer, num_tokens, shape, weights, mixture, work, products, worker)
    else:
        expert_phases.project_down(piece, layer, num_tokens, shape, weights, mixture, work, worker)


@jit.compiled
def _work(
    shape: Shape,
    weights: PackedWeights,
    mixture: MixtureState | None,
    batch: Batch,
    keys: attention.Cache,
    values: attention.Cache,
    work: Activations,
    splits: AttentionSplits,
    counters: phase_pool.Counters,
    folds: phase_pool.Counters,
    times: Int64Array,
    worker: int,
    num_workers: int,
) -> None:
    """One worker's memory, and its way through all phases."""
    columns = max(shape.head_dim, 2 * phases.OUTPUT_TILES * TILE)
    products = np.empty(phases.TOKENS_PER_PIECE * columns, dtype=np.float32)
    normalized = np.empty(shape.hidden, dtype=np.float32)
    reordered = np.empty(weights.orders.shape[1], dtype=np.float32)
    group = shape.num_heads // shape.num_kv_heads
    width = units.segment_positions(keys.shape[3])
    scratch = attention.new_scratch(units.tile_tokens(group) * group, shape.head_dim, width)
    memory = (products, normalized, reordered, scratch, times)
    phase_pool.stamp(times, 0, worker)
    _go_through(
        shape, weights, mixture, batch, keys, values, work, splits, counters, folds, memory, worker, num_workers
    )


@jit.compiled
def _place(index: int, num_layers: int) -> tuple[int, int]:
    """The layer and the phase that come as number `index` of all."""
    if index == 0:
        return 0, _EMBED
    layer = (index - 1) // _PHASES_PER_LAYER
    return layer, _LOGITS if layer == num_layers else (index - 1) % _PHASES_PER_LAYER + 1


@jit.compiled
def _go_through(
    shape: Shape,
    weights: PackedWeights,
    mixture: MixtureState | None,
    batch: Batch,
    keys: attention.Cache,
    values: attention.Cache,
    work: Activations,
    splits: AttentionSplits,
    counters: phase_pool.Counters,
    folds: phase_pool.Counters,
    memory: _Memory,
    worker: int,
    num_workers: int,
) -> None:
    """All phases. numba leaves out what a mixture that is None is asked for."""
    work, weights, batch, mixed = borrowed(work), borrowed(weights), borrowed(batch), borrowed(mixture)
    keys, values, splits = borrowed(keys), borrowed(values), borrowed(splits)
    counters, folds = borrowed(counters), borrowed(folds)
    products, normalized, reordered, scratch, times = borrowed(memory)
    num_tokens, num_logits = batch.token_ids.shape[0], batch.logit_tokens.shape[0]
    for index in range(2 + _PHASES_PER_LAYER * shape.num_layers):
        layer, phase = _place(index, shape.num_layers)
        num_pieces = _num_pieces(phase, layer, shape, weights, mixed, batch, splits.num_units)
        num_done, piece = 0, phase_pool.claim(counters, index, worker, num_workers, num_pieces)
        while piece < num_pieces:
            if layer == shape.num_layers - 1 and not _is_read(phase, piece, shape, mixed, batch, splits):
                pass  # asked of the last layer only: handing arrays over costs more than some pieces
            elif phase == _EMBED:
                phases.embed(piece, shape, weights, batch, work, normalized, reordered)
            elif phase == _QKV:
                cache = keys[layer], values[layer]
                phases.project_qkv(piece, layer, shape, weights, batch, *cache, mixed, work, products)
            elif phase == _ATTEND:
                rules = phases.scoring(layer, shape, weights)
                cache = keys[layer], values[layer]
                phases.attend(piece, shape, weights, batch, *cache, rules, splits, folds, work, scratch)
            elif phase == _REORDER:
                phases.reorder(piece, layer, num_tokens, shape, weights, work, reordered)
            elif phase == _OUTPUT:
                phases.project_output(piece, layer, num_tokens, weights, work, products)
            elif phase == _NORMALIZE:
                phases.normalize(piece, 2 * layer + 1, num_tokens, shape, weights, mixed, work, normalized, reordered)
            elif phase == _GATE and mixture is None:
                phases.gate(piece, layer, num_tokens, shape, weights, work, products)
            elif phase == _DOWN and mixture is None:
                phases.project_down(piece, layer, num_tokens, weights, work, products)
            elif phase in (_ROUTE, _GATE, _DOWN) and mixture is not None:
                _feed(phase, piece, layer, shape, weights, mixed, batch, work, products, worker)
            elif phase == _LOGITS:
                phases.project_logits(piece, num_logits, shape, weights, work)
            elif layer == shape.num_layers - 1:
                phases.normalize_last(piece, shape, weights, batch, work, normalized)
            else:
                phases.normalize(piece, 2 * layer + 2, num_tokens, shape, weights, mixed, work, normalized, reordered)
                phases.copy_aux(piece, layer + 1, batch, work)
            num_done += 1
            piece = phase_pool.claim(counters, index, worker, num_workers, num_pieces)
        phase_pool.meet(counters, index, num_done, num_pieces)
        phase_pool.stamp(times, index + 1, worker)


_work_by_name = called_by_name(_work)


@linked_to(_work, kinds_of=lambda of_run: (*of_run[:-1], types.int64, of_run[-1]))
@jit.compiled_parallel
def run(
    shape: Shape,
    weights: PackedWeights,
    mixture: MixtureState | None,
    batch: Batch,
    keys: attention.Cache,
    values: attention.Cache,
    work: Activations,
    splits: AttentionSplits,
    counters: phase_pool.Counters,
    folds: phase_pool.Counters,
    times: Int64Array,
    num_workers: int,
) -> None:
    """The step on arrays that were checked; counters are zero. times: as `phase_times` takes them, or empty."""
    for index in numba.prange(num_workers):
        worker = np.int64(index)  # of prange it is unsigned, and no name has that type
        _work_by_name(
            shape, weights, mixture, batch, keys, values, work, splits, counters, folds, times, worker, num_workers
        )
