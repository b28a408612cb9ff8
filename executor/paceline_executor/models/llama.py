"""The Llama architecture: pre-norm layers of grouped-query attention and a gated feed-forward network, no biases.

Knows the order of operations. It refuses to know how they are computed (`paceline_kernels` does), what kind of weights
a layer has (`layers` does), and how a batch came to be. Touvron et al., 2023, https://arxiv.org/abs/2302.13971; grouped
queries: Ainslie et al., 2023, https://arxiv.org/abs/2305.13245.
"""

from dataclasses import dataclass

import torch

from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import DenseLinear, Linear, read_linear, read_tensor
from paceline_executor.weights.checkpoint import Checkpoint
from paceline_kernels.activation import silu_and_multiply
from paceline_kernels.attention import paged_attention
from paceline_kernels.rms_norm import rms_norm
from paceline_kernels.rope import rope_and_write_kv, rope_table
from paceline_kernels.take_rows import take_rows


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer's weights."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values
    attention_output: Linear  # num_heads * head_dim -> hidden
    feed_forward_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate: gates, then what they gate
    down: Linear  # intermediate -> hidden


class LlamaModel:
    """A Llama-architecture model, see `Model`."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, max_model_len: int) -> None:
        config = checkpoint.config
        self._config = config
        self._embedding = read_tensor(checkpoint, "model.embed_tokens.weight", device)
        self._layers = [_read_layer(checkpoint, layer, device) for layer in range(config.num_layers)]
        self._final_norm = read_tensor(checkpoint, "model.norm.weight", device)
        self._lm_head: Linear = (
            DenseLinear(self._embedding)
            if config.tie_word_embeddings
            else read_linear(checkpoint, ("lm_head.weight",), device)
        )
        self._rope_table = rope_table(max_model_len, config.head_dim, config.rope_theta).to(device)

    def forward(self, inputs: ForwardInputs, kv_cache: KvCache) -> torch.Tensor:
        """See `Model.forward`."""
        eps = self._config.rms_norm_eps
        # The stream that every layer adds to; the norms add the output of the layer before to it in passing.
        stream = take_rows(self._embedding, inputs.token_ids)
        hidden = rms_norm(stream, self._layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in self._layers[1:]] + [self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            attended = self._attend(layer, hidden, inputs, kv_cache.keys[index], kv_cache.values[index])
            hidden = rms_norm(attended, layer.feed_forward_norm, eps, residual=stream)
            fed = layer.down(silu_and_multiply(layer.gate_up(hidden)))
            hidden = rms_norm(fed, next_norm, eps, residual=stream)
        return self._lm_head(take_rows(hidden, inputs.logit_tokens))

    def _attend(
        self, layer: LlamaLayer, hidden: torch.Tensor, inputs: ForwardInputs, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The attention block of one layer. hidden: [num_tokens, hidden], normalised. Returns the same shape."""
        config = self._config
        num_tokens, num_heads = hidden.shape[0], config.num_heads
        qkv = layer.qkv(hidden).view(num_tokens, num_heads + 2 * config.num_kv_heads, config.head_dim)
        rope_and_write_kv(qkv, self._rope_table, inputs.positions, inputs.slot_mapping, keys, values)
        attended = paged_attention(
            qkv[:, :num_heads],
            keys,
            values,
            inputs.block_tables,
            inputs.cu_seqlens,
            inputs.context_lens,
            config.head_dim**-0.5,
        )
        return layer.attention_output(attended.view(num_tokens, num_heads * config.head_dim))


def _read_layer(checkpoint: Checkpoint, layer: int, device: torch.device) -> LlamaLayer:
    prefix = f"model.layers.{layer}."

    def linear(*names: str) -> Linear:
        return read_linear(checkpoint, tuple(f"{prefix}{name}.weight" for name in names), device)

    return LlamaLayer(
        attention_norm=read_tensor(checkpoint, f"{prefix}input_layernorm.weight", device),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_output=linear("self_attn.o_proj"),
        feed_forward_norm=read_tensor(checkpoint, f"{prefix}post_attention_layernorm.weight", device),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
