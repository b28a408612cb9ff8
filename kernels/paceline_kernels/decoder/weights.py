"""What a decoder is made of, and what one step of it is asked: tensors, checked once.

Knows shapes. It refuses to know devices and files.
"""

from dataclasses import dataclass

import torch

from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.quantized_linear.packing import PackedWeight
from paceline_kernels.quantized_linear.tiles import GROUP


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: norm, attention, norm, gated feed-forward network."""

    attention_norm: torch.Tensor  # [hidden] float32
    qkv: PackedWeight  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values
    attention_output: PackedWeight  # num_heads * head_dim -> hidden
    feed_forward_norm: torch.Tensor  # [hidden] float32
    gate_up: PackedWeight  # hidden -> 2 * intermediate: gates, then what they gate
    down: PackedWeight  # intermediate -> hidden


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder. Raises KernelArgumentError where the parts do not fit together."""

    embedding: PackedWeight  # vocab rows of hidden
    layers: tuple[DecoderLayer, ...]
    final_norm: torch.Tensor  # [hidden] float32
    lm_head: PackedWeight  # hidden -> vocab; may be the embedding
    rope_table: torch.Tensor  # [num_positions, head_dim] float32, see `paceline_kernels.rope.rope_table`
    num_heads: int
    num_kv_heads: int
    head_dim: int  # a multiple of 32
    rms_norm_eps: float

    def __post_init__(self) -> None:
        """Check every shape."""
        hidden, intermediate = self.embedding.num_inputs, self.intermediate_size
        attended = self.num_heads * self.head_dim
        for layer in self.layers:
            _check("qkv", layer.qkv, attended + 2 * self.num_kv_heads * self.head_dim, hidden)
            _check("attention_output", layer.attention_output, hidden, attended)
            _check("gate_up", layer.gate_up, 2 * intermediate, hidden)
            _check("down", layer.down, hidden, intermediate)
        _check("lm_head", self.lm_head, self.embedding.num_outputs, hidden)
        norms = [norm for layer in self.layers for norm in (layer.attention_norm, layer.feed_forward_norm)]
        if any(norm.shape != (hidden,) for norm in (*norms, self.final_norm)):
            raise KernelArgumentError("decoder", f"a norm does not have {hidden} weights")
        if self.num_heads % self.num_kv_heads or self.rope_table.shape[1:] != (self.head_dim,):
            raise KernelArgumentError("decoder", "heads, KV heads and rotary table do not fit together")
        if any(size % GROUP for size in (hidden, intermediate, self.head_dim)):
            raise KernelArgumentError("decoder", "hidden size, intermediate size and head_dim must be multiples of 32")

    @property
    def intermediate_size(self) -> int:
        """The width of the feed-forward network."""
        return self.layers[0].down.num_inputs


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


def _check(name: str, weight: PackedWeight, num_outputs: int, num_inputs: int) -> None:
    if (weight.num_outputs, weight.num_inputs) != (num_outputs, num_inputs):
        shape = [weight.num_outputs, weight.num_inputs]
        raise KernelArgumentError("decoder", f"{name} has shape {shape} where {[num_outputs, num_inputs]} is needed")
