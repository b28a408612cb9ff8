"""decoder in plain torch: the references of its parts, one after the other; all sums are in float64.

What the contract rounds is rounded here too: the inputs of every product to int8 for each group of 32, keys and values
in the way the cache keeps them.
"""

from dataclasses import replace

import torch

from paceline_kernels.activation import Gate
from paceline_kernels.activation.reference import gate
from paceline_kernels.attention.reference import (
    int8_keys,
    int8_scales,
    int8_values,
    paged_attention,
    paged_attention_int8,
)
from paceline_kernels.decoder.weights import AuxHidden, DecoderBatch, DecoderLayer, DecoderWeights, Experts
from paceline_kernels.experts.reference import route
from paceline_kernels.quantized_linear.packing import PackedWeight
from paceline_kernels.quantized_linear.reference import quantized_linear, unpack
from paceline_kernels.rms_norm.reference import rms_norm
from paceline_kernels.rope.reference import rotate

_MAX_INT8 = 127
# Below this the contract calls all values of a slot zero.
_SMALLEST = 1e-30


def forward(
    weights: DecoderWeights,
    batch: DecoderBatch,
    keys: torch.Tensor,
    values: torch.Tensor,
    aux: AuxHidden | None = None,
) -> torch.Tensor:
    eps = weights.rms_norm_eps
    stream = _embed(weights.embedding, batch.token_ids) * weights.embedding_scale  # [tokens, hidden] float64
    for index, layer in enumerate(weights.layers):
        post = layer.post_norms
        if aux is not None and index in aux.layers:
            aux.states[:, aux.layers.index(index)] = stream.float()
        hidden = _in_order(rms_norm(stream, layer.attention_norm, eps), layer.orders.qkv)
        attended = _attend(weights, layer, hidden, batch, keys[index], values[index])
        attended = _in_order(attended, layer.orders.attention_output)
        output = _product(attended, layer.attention_output, layer.attention_output_bias)
        stream = stream + _normalised(output, post.attention if post else None, eps)
        fed = _feed(layer, rms_norm(stream, layer.feed_forward_norm, eps), weights.gate)
        stream = stream + _normalised(fed, post.feed_forward if post else None, eps)
    last = rms_norm(stream[batch.logit_tokens.long()], weights.final_norm, eps)
    logits, cap = _product(last, weights.lm_head), weights.logit_softcap
    return (logits if cap is None else cap * torch.tanh(logits / cap)).float()


def _feed(layer: DecoderLayer, hidden: torch.Tensor, kind: Gate) -> torch.Tensor:
    """What networks make of hidden states: the one for all tokens, and those that tokens choose."""
    fed, experts = torch.zeros_like(hidden, dtype=torch.float64), layer.experts
    ordered = _in_order(hidden, layer.orders.gate_up)
    if layer.gate_up is not None and layer.down is not None:
        gates, ups = _product(ordered, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
        fed += _product(gate(gates, kind) * ups, layer.down, layer.down_bias)
    if experts is None:
        return fed
    if experts.shared_gate is not None:
        fed *= torch.sigmoid(hidden.double() @ experts.shared_gate.double())[:, None]
    routes = route(hidden.double() @ experts.router.double().T, experts.routing, experts.bias)
    for expert in range(experts.routing.num_experts):
        tokens, choices = torch.where(routes.experts == expert)
        if len(tokens):
            gate_up, down = (_of_expert(matrix, expert, experts) for matrix in (experts.gate_up, experts.down))
            gates, ups = _product(ordered[tokens], gate_up).chunk(2, dim=1)
            fed[tokens] += routes.weights[tokens, choices, None].double() * _product(gate(gates, kind) * ups, down)
    return fed


def _of_expert(matrix: PackedWeight, expert: int, experts: Experts) -> PackedWeight:
    count = experts.routing.num_experts
    return replace(matrix, data=matrix.data.chunk(count)[expert], num_outputs=matrix.num_outputs // count)


def _in_order(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return x if order is None else x[:, order.long()]


def _normalised(x: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if norm is None else rms_norm(x, norm, eps)


def _normalised_heads(heads: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Each by itself, or all of a token together, if the norm is as long."""
    together = heads if norm is None or norm.shape[0] == heads.shape[2] else heads.flatten(1)
    return _normalised(together, norm, eps).double().view_as(heads)


def _embed(embedding: PackedWeight, token_ids: torch.Tensor) -> torch.Tensor:
    integers, scales, minima = (part[token_ids.long()] for part in unpack(embedding))
    return (integers * scales[:, :, None] + minima[:, :, None]).flatten(1)


def _product(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = quantized_linear(x.float(), weight).double()
    return product if bias is None else product + bias


def _attend(
    weights: DecoderWeights,
    layer: DecoderLayer,
    hidden: torch.Tensor,
    batch: DecoderBatch,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """What the heads of one layer see, [tokens, num_heads * head_dim]; writes the layer's slots first."""
    num_kv_heads, head_dim = weights.num_kv_heads, weights.head_dim
    qkv = _product(hidden, layer.qkv, layer.qkv_bias).view(hidden.shape[0], -1, head_dim)
    queries, new_keys, new_values = torch.split(qkv, [weights.num_heads, num_kv_heads, num_kv_heads], dim=1)
    norms = layer.head_norms
    queries = _normalised_heads(queries, norms.query if norms else None, weights.rms_norm_eps)
    new_keys = _normalised_heads(new_keys, norms.key if norms else None, weights.rms_norm_eps)
    angles = weights.rope_tables[layer.rope_table][batch.positions.long()].double().unsqueeze(1).chunk(2, dim=-1)
    new_keys, queries = rotate(new_keys, *angles).float(), rotate(queries, *angles)
    rows = (batch.block_tables, batch.cu_seqlens, batch.context_lens)
    scale, cap = weights.attention_scale or head_dim**-0.5, weights.attention_softcap
    blocks, offsets = batch.slot_mapping // keys.shape[2], batch.slot_mapping % keys.shape[2]
    if keys.dtype == torch.int8:
        integers, int8_scales(keys)[blocks, :, offsets] = _int8(new_keys)
        int8_keys(keys)[blocks, :, offsets] = integers.reshape(*integers.shape[:-1], -1, 2)
        integers, int8_scales(values)[blocks, :, offsets] = _int8(new_values.float())
        int8_values(values)[blocks, :, offsets // 2, offsets % 2] = integers
        return paged_attention_int8(queries, keys, values, *rows, scale, window=layer.window, softcap=cap).flatten(1)
    keys[blocks, :, offsets], values[blocks, :, offsets] = new_keys.to(keys.dtype), new_values.to(values.dtype)
    caches = (keys.double(), values.double())
    return paged_attention(queries, *caches, *rows, scale, window=layer.window, softcap=cap).flatten(1)


def _int8(written: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers under one scale for each slot, and the scales, in float32 as the contract says."""
    largest = written.abs().amax(dim=-1, keepdim=True)
    factors = torch.where(largest < _SMALLEST, torch.zeros_like(largest), _MAX_INT8 / largest)
    scales = torch.where(largest < _SMALLEST, torch.zeros_like(largest), largest / _MAX_INT8)
    return (written * factors).round().to(torch.int8), scales[..., 0]
