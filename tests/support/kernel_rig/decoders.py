"""Random decoders for tests: as Llama has it, with everything that other families have besides, and with experts.

Knows sizes, small and different from each other. It asserts nothing.
"""

import dataclasses

import torch

from kernel_rig.packed import random_packed_weight
from paceline_kernels.activation import Gate
from paceline_kernels.decoder import DecoderLayer, DecoderWeights, Experts, HeadNormWeights, InputOrders, PostNorms
from paceline_kernels.quantized_linear import WeightFormat
from paceline_kernels.rope import rope_frequencies, rope_table
from paceline_kernels.routing import Routing, Score

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 96, 64, 3, 1, 32, 100
NUM_LAYERS, NUM_POSITIONS = 2, 600
_INT4, _INT8 = WeightFormat.INT4, WeightFormat.INT8


def llama_weights() -> DecoderWeights:
    """Two layers that hold 4 and 8 bits in turn."""
    return DecoderWeights(
        embedding=random_packed_weight(VOCAB, HIDDEN, _INT8, 1),
        layers=(_layer((_INT4, _INT8, _INT4, _INT8), 10), _layer((_INT8, _INT4, _INT8, _INT4), 20)),
        final_norm=_norm(2),
        lm_head=random_packed_weight(VOCAB, HIDDEN, _INT4, 3),
        rope_tables=_table(10_000.0)[None],
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
    )


def weights_with_everything() -> DecoderWeights:
    """Such matrices, some with zero points, and all that a decoder may have; the first layer sees 50 positions, the
    second all.
    """
    plain = llama_weights()
    first, second = plain.layers
    return dataclasses.replace(
        plain,
        layers=(_with_everything(first, 230, 1, 50), _with_everything(second, 240, 0, None)),
        rope_tables=torch.stack((_table(10_000.0), _table(100.0))),
        gate=Gate.GELU_TANH,
        embedding_scale=2.0,
        attention_scale=1.0,
        attention_softcap=6.0,
        logit_softcap=2.0,
    )


def mixture_weights(
    routing: Routing,
    kind: WeightFormat = _INT4,
    *,
    shared_width: int = 0,
    bias: torch.Tensor | None = None,
    norms_span_heads: bool = False,
) -> DecoderWeights:
    """A layer for all tokens, and one of experts of this kind, with inputs in an order of their own; beside them a
    shared expert of 8 bits and its gate, if it has a width. norms_span_heads: of queries and keys.
    """
    plain, (num_experts, size) = llama_weights(), (routing.num_experts, 32)
    first, second = plain.layers
    experts = Experts(
        routing,
        router=torch.randn(num_experts, HIDDEN, generator=torch.Generator().manual_seed(50)) / 4,
        gate_up=random_packed_weight(num_experts * 2 * size, HIDDEN, kind, 51),
        down=random_packed_weight(num_experts * HIDDEN, size, kind, 52),
        bias=bias,
        shared_gate=(_norm(53) - 1) * 3 if shared_width else None,
    )
    shared = [((2 * shared_width, HIDDEN), 54), ((HIDDEN, shared_width), 55)] if shared_width else []
    gate_up, down = [random_packed_weight(*shape, _INT8, seed) for shape, seed in shared] or (None, None)
    orders = InputOrders(gate_up=_order(56, HIDDEN))
    mixed = dataclasses.replace(second, gate_up=gate_up, down=down, orders=orders, experts=experts)
    layers: tuple[DecoderLayer, ...] = (first, mixed)
    if norms_span_heads:
        sizes = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
        norms = HeadNormWeights(*(_norm(57 + i, size) for i, size in enumerate(sizes)))
        layers = tuple(dataclasses.replace(each, head_norms=norms) for each in layers)
    return dataclasses.replace(plain, layers=layers)


def mixtures() -> dict[str, DecoderWeights]:
    """By how their routers choose."""
    unwanted, wanted = torch.tensor([0, 0.1, -9, 0.2, -9, 0, 0.3]), torch.tensor([0.0] * 6 + [9.0])
    return {
        "renormalised": mixture_weights(Routing(7, 3)),
        "of 8 bits, weights as they are": mixture_weights(
            Routing(7, 3, renormalises=False, scaling=2.5), WeightFormat.INT8
        ),
        "all experts": mixture_weights(Routing(7, 7), shared_width=96),
        "one expert of few, norms over all heads": mixture_weights(
            Routing(3, 1, Score.SOFTMAX_OF_CHOSEN), norms_span_heads=True
        ),
        "of the best groups": mixture_weights(Routing(16, 3, Score.SIGMOID, num_groups=4, top_groups=2)),
        "two that nobody takes": mixture_weights(Routing(7, 2, Score.SIGMOID, has_bias=True), bias=unwanted),
        "one that everybody takes": mixture_weights(Routing(7, 1, Score.SIGMOID, has_bias=True), bias=wanted),
    }


def _norm(seed: int, size: int = HIDDEN) -> torch.Tensor:
    return 1 + 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _table(theta: float) -> torch.Tensor:
    return rope_table(NUM_POSITIONS, rope_frequencies(HEAD_DIM, theta))


def _layer(formats: tuple[WeightFormat, WeightFormat, WeightFormat, WeightFormat], seed: int) -> DecoderLayer:
    shapes = [((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, NUM_HEADS * HEAD_DIM)]
    shapes += [(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
    qkv, output, gate_up, down = (
        random_packed_weight(*shape, kind, seed + i)
        for i, (shape, kind) in enumerate(zip(shapes, formats, strict=True))
    )
    return DecoderLayer(_norm(seed), qkv, output, _norm(seed + 1), gate_up, down)


def _with_everything(layer: DecoderLayer, seed: int, rope_table: int, window: int | None) -> DecoderLayer:
    assert layer.gate_up is not None
    zeros = random_packed_weight(layer.gate_up.num_outputs, HIDDEN, WeightFormat.INT4_ZEROS, seed, span=2)
    return dataclasses.replace(
        layer,
        gate_up=zeros,
        qkv_bias=_norm(seed, layer.qkv.num_outputs) - 1,
        attention_output_bias=_norm(seed + 1) - 1,
        gate_up_bias=_norm(seed + 2, layer.gate_up.num_outputs) - 1,
        down_bias=_norm(seed + 3) - 1,
        head_norms=HeadNormWeights(_norm(seed + 4, HEAD_DIM), _norm(seed + 5, HEAD_DIM)),
        post_norms=PostNorms(_norm(seed + 6), _norm(seed + 7)),
        orders=InputOrders(_order(seed, HIDDEN), _order(seed + 1, NUM_HEADS * HEAD_DIM), _order(seed + 2, HIDDEN)),
        rope_table=rope_table,
        window=window,
    )


def _order(seed: int, size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).int()
