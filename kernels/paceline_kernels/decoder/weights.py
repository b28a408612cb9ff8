"""What a decoder is made of, and what one step of it is asked: tensors, checked once.

Knows shapes. It refuses to know devices and files.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline_kernels.activation import Gate
from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.quantized_linear.packing import GROUP, PackedWeight
from paceline_kernels.routing import Routing


@dataclass(frozen=True, slots=True)
class HeadNormWeights:
    """Norms of every query head and every key head, before they are rotated: [head_dim] float32.

    Beside experts also of all heads of a token together: [num_heads * head_dim] and [num_kv_heads * head_dim].
    """

    query: torch.Tensor
    key: torch.Tensor


@dataclass(frozen=True, slots=True)
class PostNorms:
    """Norms of what attention, and the feed-forward network, add to the stream: [hidden] float32."""

    attention: torch.Tensor
    feed_forward: torch.Tensor


class InputOrders(NamedTuple):
    """Which input each input of a packed matrix is, int32: groups of it share a scale, but are no neighbours. None:
    all are where they were.

    Those of `down` have none: the outputs of `gate_up` may come in any order.
    """

    qkv: torch.Tensor | None = None  # [hidden]
    attention_output: torch.Tensor | None = None  # [num_heads * head_dim]
    gate_up: torch.Tensor | None = None  # [hidden]


_AS_THEY_ARE = InputOrders()


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's mixture: networks of one size, of which a token goes through those that the router chooses.

    All matrices of a kind are one, expert after expert, so that an expert is a range of its tiles.
    """

    routing: Routing
    router: torch.Tensor  # [num_experts, hidden] float32, because rounding would change choices
    gate_up: PackedWeight  # hidden -> num_experts * 2 * intermediate: of each gates, then what they gate
    down: PackedWeight  # intermediate -> num_experts * hidden
    bias: torch.Tensor | None = None  # [num_experts] float32, of a routing that has one
    shared_gate: torch.Tensor | None = None  # [hidden] float32: the shared expert counts times its product's sigmoid


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: norm, attention, norm, gated feed-forward network. What is None, a layer does without.

    All layers of a decoder have the same parts, but networks: a layer may have experts, `gate_up` and `down` for all
    tokens, or both, whose results are added: these are a shared expert then.
    """

    attention_norm: torch.Tensor  # [hidden] float32
    qkv: PackedWeight  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values
    attention_output: PackedWeight  # num_heads * head_dim -> hidden
    feed_forward_norm: torch.Tensor  # [hidden] float32
    gate_up: PackedWeight | None  # hidden -> 2 * intermediate: gates, then what they gate
    down: PackedWeight | None  # intermediate -> hidden
    qkv_bias: torch.Tensor | None = None  # float32, of the outputs of `qkv`; the other biases likewise
    attention_output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    head_norms: HeadNormWeights | None = None
    post_norms: PostNorms | None = None
    orders: InputOrders = _AS_THEY_ARE
    rope_table: int = 0  # which of the decoder's
    window: int | None = None  # how many positions a token sees, its own included; None for all
    experts: Experts | None = None

    @property
    def width(self) -> int:
        """The intermediate size of the network that all tokens go through; 0 without one."""
        return 0 if self.down is None else self.down.num_inputs

    @property
    def matrices(self) -> tuple[PackedWeight, ...]:
        of_experts = () if self.experts is None else (self.experts.gate_up, self.experts.down)
        every = (self.qkv, self.attention_output, self.gate_up, self.down, *of_experts)
        return tuple(matrix for matrix in every if matrix is not None)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder. Raises KernelArgumentError where the parts do not fit together."""

    embedding: PackedWeight  # vocab rows of hidden
    layers: tuple[DecoderLayer, ...]
    final_norm: torch.Tensor  # [hidden] float32
    lm_head: PackedWeight  # hidden -> vocab; may be the embedding
    rope_tables: torch.Tensor  # [num_tables, num_positions, head_dim] float32, see `paceline_kernels.rope.rope_table`
    num_heads: int
    num_kv_heads: int
    head_dim: int  # a multiple of 32
    rms_norm_eps: float
    gate: Gate = Gate.SILU
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of q . k; None is head_dim**-0.5
    attention_softcap: float | None = None  # above 0: scores become cap * tanh(score / cap)
    logit_softcap: float | None = None  # above 0: logits likewise

    def __post_init__(self) -> None:
        """Check every shape."""
        hidden = self.embedding.num_inputs
        attended = self.num_heads * self.head_dim
        for layer in self.layers:
            _check("qkv", layer.qkv, attended + 2 * self.num_kv_heads * self.head_dim, hidden)
            _check("attention_output", layer.attention_output, hidden, attended)
            self._check_networks(layer)
            _check_orders(layer.orders, hidden, attended)
            if not 0 <= layer.rope_table < self.rope_tables.shape[0]:
                raise KernelArgumentError("decoder", f"there is no rotary table {layer.rope_table}")
            if layer.window is not None and layer.window < 1:
                raise KernelArgumentError("decoder", f"a window of {layer.window} positions shows nothing")
        _check("lm_head", self.lm_head, self.embedding.num_outputs, hidden)
        if self.num_heads % self.num_kv_heads or self.rope_tables.shape[2:] != (self.head_dim,):
            raise KernelArgumentError("decoder", "heads, KV heads and rotary tables do not fit together")
        self._check_vectors()
        if any(size % GROUP for layer in self.layers for size in (hidden, layer.width, self.head_dim)):
            raise KernelArgumentError("decoder", "hidden size, intermediate size and head_dim must be multiples of 32")

    @property
    def num_bytes(self) -> int:
        """Of its matrices."""
        matrices = [matrix for layer in self.layers for matrix in layer.matrices]
        routers = [layer.experts.router.nbytes for layer in self.layers if layer.experts]
        ends = [self.embedding] if self.lm_head is self.embedding else [self.embedding, self.lm_head]
        return sum(matrix.num_bytes for matrix in (*matrices, *ends)) + sum(routers)

    @property
    def experts(self) -> Experts | None:
        """Those of the first layer that has any: all have their sizes."""
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def has_orders(self) -> bool:
        """Of the inputs of any matrix."""
        return any(order is not None for layer in self.layers for order in layer.orders)

    def _check_networks(self, layer: DecoderLayer) -> None:
        """Beside experts those for all tokens may be of any width, else they are as wide as in the first layer."""
        hidden, experts = self.embedding.num_inputs, self.experts
        width = self.layers[0].width if experts is None else layer.width
        if layer.gate_up is not None and layer.down is not None:
            _check("gate_up", layer.gate_up, 2 * width, hidden)
            _check("down", layer.down, hidden, width)
        elif layer.gate_up is not layer.down or layer.experts is None:
            raise KernelArgumentError("decoder", "a layer needs gate_up and down, or experts")
        if experts is not None and (layer.gate_up_bias is not None or layer.down_bias is not None):
            raise KernelArgumentError("decoder", "beside experts networks have no biases")
        if experts is not None and layer.experts is not None:
            _check_experts(layer.experts, experts, hidden)
            if layer.experts.shared_gate is not None and layer.down is None:
                raise KernelArgumentError("decoder", "there is no shared expert for experts.shared_gate")

    def _check_vectors(self) -> None:
        """Norms and biases: of the right sizes, and every layer with the same ones."""
        hidden = self.embedding.num_inputs
        vectors = [self._vectors(layer) for layer in self.layers]
        for name, vector, size in (("final_norm", self.final_norm, hidden), *itertools.chain(*vectors)):
            if vector.shape != (size,) or vector.dtype != torch.float32:
                raise KernelArgumentError("decoder", f"{name} must be {size} float32 numbers")
        if len({tuple(name for name, _, _ in of_layer) for of_layer in vectors}) > 1:
            raise KernelArgumentError("decoder", "not all layers have the same norms and biases")

    def _vectors(self, layer: DecoderLayer) -> list[tuple[str, torch.Tensor, int]]:
        """The norms and biases that a layer has: name, numbers, and how many there should be."""
        hidden, head_dim = self.embedding.num_inputs, self.head_dim
        heads, post = layer.head_norms, layer.post_norms
        spans_heads = heads is not None and self.experts is not None and heads.query.shape != (head_dim,)
        num_queries, num_keys = (self.num_heads, self.num_kv_heads) if spans_heads else (1, 1)
        vectors = (
            ("attention_norm", layer.attention_norm, hidden),
            ("feed_forward_norm", layer.feed_forward_norm, hidden),
            ("qkv_bias", layer.qkv_bias, layer.qkv.num_outputs),
            ("attention_output_bias", layer.attention_output_bias, hidden),
            ("gate_up_bias", layer.gate_up_bias, 2 * layer.width),
            ("down_bias", layer.down_bias, hidden),
            ("head_norms.query", heads.query if heads else None, num_queries * head_dim),
            ("head_norms.key", heads.key if heads else None, num_keys * head_dim),
            ("post_norms.attention", post.attention if post else None, hidden),
            ("post_norms.feed_forward", post.feed_forward if post else None, hidden),
        )
        return [(name, vector, size) for name, vector, size in vectors if vector is not None]

    @property
    def intermediate_size(self) -> int:
        """The width of all networks that a token goes through, at most."""
        experts = self.experts
        of_experts = 0 if experts is None else experts.routing.top_k * experts.down.num_inputs
        return max(layer.width for layer in self.layers) + of_experts


@dataclass(frozen=True, slots=True)
class DecoderBatch:
    """One varlen batch, batch row after batch row; all contiguous."""

    token_ids: torch.Tensor  # [num_tokens] int32
    positions: torch.Tensor  # [num_tokens] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64: block * block_size + slot of each token, no two alike
    cu_seqlens: torch.Tensor  # [num_rows + 1] int32
    context_lens: torch.Tensor  # [num_rows] int32
    block_tables: torch.Tensor  # [num_rows, max_blocks_per_row] int32
    logit_tokens: torch.Tensor  # [num_logits] int32: the tokens, as places in the batch, whose logits are wanted


@dataclass(frozen=True, slots=True)
class AuxHidden:
    """Hidden states for a drafter: where a step puts what flows into each of `layers`, its tokens in batch order."""

    layers: tuple[int, ...]  # 1 to num_layers - 1, each once: the input of a layer is the output of the one before
    states: torch.Tensor  # [num_tokens, len(layers), hidden] float32, written


def _check_orders(orders: InputOrders, hidden: int, attended: int) -> None:
    for name, order, size in zip(orders._fields, orders, (hidden, attended, hidden), strict=True):
        if order is None:
            continue
        if order.dtype != torch.int32 or not torch.equal(order.sort().values, torch.arange(size, dtype=torch.int32)):
            raise KernelArgumentError("decoder", f"the order of {name} must name each of {size} inputs once")


def _check_experts(experts: Experts, first: Experts, hidden: int) -> None:
    """Against those of the first layer that has any."""
    count, width = first.routing.num_experts, first.down.num_inputs
    _check("experts.gate_up", experts.gate_up, count * 2 * width, hidden)
    _check("experts.down", experts.down, count * hidden, width)
    vectors = (("bias", experts.bias, (count,)), ("shared_gate", experts.shared_gate, (hidden,)))
    for name, tensor, shape in (("router", experts.router, (count, hidden)), *vectors):
        if tensor is not None:
            check_tensor("decoder", f"experts.{name}", tensor, torch.float32, shape)
    if experts.routing != first.routing or first.routing.has_bias != (experts.bias is not None):
        raise KernelArgumentError("decoder", "all experts must have one routing, and a bias if that has one")
    if width % GROUP:
        raise KernelArgumentError("decoder", f"an expert's intermediate size must be a multiple of 32, not {width}")


def _check(name: str, weight: PackedWeight, num_outputs: int, num_inputs: int) -> None:
    if (weight.num_outputs, weight.num_inputs) != (num_outputs, num_inputs):
        shape = [weight.num_outputs, weight.num_inputs]
        raise KernelArgumentError("decoder", f"{name} has shape {shape} where {[num_outputs, num_inputs]} is needed")
