"""What the compiled decoder works on: arrays, grouped by what they are for.

Knows shapes. The same memory serves every step, because fresh memory costs a page fault for each 4 KiB of it.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_kernels.compiler.jit import compiled
from paceline_kernels.quantized_linear.packing import GROUP

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# Columns of `PackedWeights.matrices`. In those of the last two are an address and that of the bias, and an address.
QKV, ATTENTION_OUTPUT, GATE_UP, DOWN, EXPERTS_GATE_UP, EXPERTS_DOWN, ROUTER, SHARED_GATE = range(8)
# Parts of `PackedWeights.extras`: biases of the matrices, norms of heads, norms of what a layer adds.
QKV_BIAS, OUTPUT_BIAS, GATE_UP_BIAS, DOWN_BIAS, QUERY_NORM, KEY_NORM, ATTENTION_NORM, FEED_FORWARD_NORM = range(8)
# Columns of `PackedWeights.layer_options`.
ROPE_TABLE, WINDOW, WIDTH = range(3)


class Shape(NamedTuple):
    """The model's sizes."""

    num_layers: int
    hidden: int
    intermediate: int  # of all networks that a token goes through
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    eps: Any  # float32, of the norms
    gate: int  # a value of `paceline_kernels.activation.Gate`
    embedding_scale: Any  # float32
    attention_scale: Any  # float32
    attention_softcap: Any  # float32; 0 where scores are not capped
    logit_softcap: Any  # float32; 0 where logits are not capped


class PackedWeights(NamedTuple):
    """The packed matrices of all layers by address, and the rest in few arrays: each takes the compiler a second."""

    matrices: Int64Array  # [num_layers, 8, 2]: address, format; zeros for what a layer lacks
    extras: Float32Array  # [num_layers, ...]: the vectors that not every model has, side by side
    extra_starts: Int64Array  # [9]: where each begins, and the last ends; what a model lacks is empty
    norms: Float32Array  # [2 * num_layers + 1, hidden]: two of each layer, then the last
    embedding: npt.NDArray[np.uint8]
    embedding_format: int
    lm_head: npt.NDArray[np.uint8]
    lm_head_format: int
    rope_tables: Float32Array  # [num_tables, num_positions, head_dim]
    layer_options: Int64Array  # [num_layers, 3]: which of them, how many positions a token sees, `DecoderLayer.width`
    orders: Int32Array  # [num_layers, hidden + heads * head_dim + hidden]: InputOrders; [0, 0] without any


class MixtureState(NamedTuple):
    """How tokens choose experts, and memory for what they chose, of as many tokens as `Activations`.

    Tokens come in blocks of `tokens_per_block`, and a slot is a token and one of its choices. Those of a block lie
    expert by expert, so that a block's are neighbours. A unit is up to 64 slots of an expert, or as many tokens that go
    through the network for all.
    """

    num_experts: int
    top_k: int
    intermediate: int  # of an expert
    score: int  # a place in `SCORES`
    renormalises: int  # 0 or 1
    scaling: Any  # float32
    num_groups: int
    top_groups: int
    tokens_per_block: int
    scores: Float32Array  # [tokens, 2 * num_experts + num_groups]: scores, and what choices are made by
    choices: Int32Array  # [tokens, top_k]: experts, the first of them -1 for a token that nobody reads
    weights: Float32Array  # [tokens, top_k + 1]: of the choices, and of the network for all
    places: Int32Array  # [tokens, top_k]: where in its block each choice's slot lies
    tokens: Int32Array  # [tokens * top_k]: whose each slot is
    next_places: Int32Array  # [layers, blocks, num_experts]: where in its block an expert's next slot lies, or its end
    units: Int32Array  # [blocks, units, 3]: expert, or -1; first slot, or token; how many
    # [layers, blocks, 3]: units of experts, those of the network for all, experts that were chosen. Of each layer, as
    # a worker that was put aside still counts the pieces of a layer that others have left.
    num_units: Int64Array
    counters: Int64Array  # of `phase_pool`: for each few tokens that are routed together, then for each block
    gathered: Int64Array  # [workers] the unit whose rows a worker has side by side
    gathered_integers: npt.NDArray[np.int8]  # [workers, 64, hidden]
    gathered_scales: Float32Array
    gathered_sums: Float32Array
    results: Float32Array  # [workers, 32 of each slot and each token of a block, and of one token more]


class Batch(NamedTuple):
    """The arrays of a `DecoderBatch` and an `AuxHidden`, as compiled code takes them."""

    token_ids: Int32Array
    positions: Int32Array
    slots: Int64Array
    cu_seqlens: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    logit_tokens: Int32Array
    aux_layers: Int64Array
    aux_states: Float32Array


class Quantized(NamedTuple):
    """Rows made int8, group by group."""

    integers: npt.NDArray[np.int8]  # [tokens, width]
    scales: Float32Array  # [tokens, width / 32]
    sums: Float32Array  # [tokens, width / 32]


class Activations(NamedTuple):
    """What lives between two phases; as many tokens as the largest batch so far, rounded up.

    Flat, because numba takes no tuple of tuples into a parallel region; `hidden`, `attended` and `fed` group the parts.
    """

    stream: Float32Array  # [tokens, hidden] that every layer adds to
    addend: Float32Array  # [tokens, hidden] what is normalised before it is added, where layers do that
    hidden_integers: npt.NDArray[np.int8]  # the normalised stream
    hidden_scales: Float32Array
    hidden_sums: Float32Array
    query: Float32Array  # [tokens, num_heads, head_dim]
    attended: Float32Array  # [tokens, num_heads, head_dim]
    attended_integers: npt.NDArray[np.int8]  # the same
    attended_scales: Float32Array
    attended_sums: Float32Array
    fed_integers: npt.NDArray[np.int8]  # what the gates of the feed-forward network let through
    fed_scales: Float32Array
    fed_sums: Float32Array
    logits: Float32Array  # [logits, vocab, rounded up to tiles]


@compiled
def has_extra(weights: PackedWeights, part: int) -> bool:
    """Whether the model has this part. Asked before `extra`, which counts a reference in and out."""
    return int(weights.extra_starts[part + 1]) > int(weights.extra_starts[part])


@compiled
def extra(weights: PackedWeights, layer: int, part: int) -> Float32Array:
    """A vector that not every model has."""
    return weights.extras[layer, weights.extra_starts[part] : weights.extra_starts[part + 1]]


@compiled
def has_orders(weights: PackedWeights) -> bool:
    return int(weights.orders.shape[0]) > 0


@compiled
def hidden(work: Activations) -> Quantized:
    """[tokens, hidden] the normalised stream."""
    return Quantized(work.hidden_integers, work.hidden_scales, work.hidden_sums)


@compiled
def attended(work: Activations) -> Quantized:
    """[tokens, num_heads * head_dim] what attention gave."""
    return Quantized(work.attended_integers, work.attended_scales, work.attended_sums)


@compiled
def fed(work: Activations) -> Quantized:
    """[tokens, intermediate] what the gates let through."""
    return Quantized(work.fed_integers, work.fed_scales, work.fed_sums)


class AttentionSplits(NamedTuple):
    """How attention is cut, see `attention.cpu`."""

    units: Int64Array  # [units, 7]
    first_partial: Int64Array  # [rows + 1]
    max: Float32Array  # [partials, num_heads]
    sum: Float32Array  # [partials, num_heads]
    sums: Float32Array  # [partials, num_heads, head_dim]
    num_units: int


def new_activations(shape: Shape, num_tokens: int, num_logits: int, vocab_columns: int) -> Activations:
    """Memory for so many tokens and rows of logits."""
    heads = (num_tokens, shape.num_heads, shape.head_dim)
    return Activations(
        np.empty((num_tokens, shape.hidden), dtype=np.float32),
        np.empty((num_tokens, shape.hidden), dtype=np.float32),
        *_new_quantized(num_tokens, shape.hidden),
        np.empty(heads, dtype=np.float32),
        np.empty(heads, dtype=np.float32),
        *_new_quantized(num_tokens, shape.num_heads * shape.head_dim),
        *_new_quantized(num_tokens, shape.intermediate),
        np.empty((num_logits, vocab_columns), dtype=np.float32),
    )


def new_splits(shape: Shape, num_rows: int, num_units: int, num_partials: int) -> AttentionSplits:
    """Memory for so many units and partial results."""
    return AttentionSplits(
        units=np.empty((num_units, 7), dtype=np.int64),
        first_partial=np.empty(num_rows + 1, dtype=np.int64),
        max=np.empty((num_partials, shape.num_heads), dtype=np.float32),
        sum=np.empty((num_partials, shape.num_heads), dtype=np.float32),
        sums=np.empty((num_partials, shape.num_heads, shape.head_dim), dtype=np.float32),
        num_units=0,
    )


def _new_quantized(num_tokens: int, width: int) -> Quantized:
    return Quantized(
        integers=np.empty((num_tokens, width), dtype=np.int8),
        scales=np.empty((num_tokens, width // GROUP), dtype=np.float32),
        sums=np.empty((num_tokens, width // GROUP), dtype=np.float32),
    )
