"""The head of EAGLE-3: one layer that guesses the next token but one from hidden states of a target and the next token.

Knows the order of operations, and which weights go together. It refuses to know which positions are computed when, and
how tokens are drawn (`speculation.eagle3` does).

Li et al., 2025, https://arxiv.org/abs/2503.01840. A *feature* is what a target's hidden states are reduced to, or what
the head itself returned for the position before. It goes with the token that follows it, at its own position.
"""

from collections.abc import Callable

import numpy as np
import torch

from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import DenseLinear, Linear, PackedLinear
from paceline_executor.models.llama import GATES
from paceline_executor.models.rope import rope_tables
from paceline_executor.numerics import MatrixKind
from paceline_executor.weights.checkpoint import Float32Array
from paceline_executor.weights.hf.eagle3 import Eagle3Checkpoint
from paceline_kernels.activation import gate_and_multiply
from paceline_kernels.attention import Splits, paged_attention
from paceline_kernels.quantized_linear import pack_int8, quantize, unpack_rows
from paceline_kernels.quantized_linear.packing import GROUP
from paceline_kernels.rms_norm import rms_norm
from paceline_kernels.rope import rope_and_write_kv
from paceline_kernels.take_rows import take_rows

Embedding = Callable[[torch.Tensor], torch.Tensor]

_IN_FLOAT32 = ("linear", "rms_norm", "add_rms_norm", "gate_and_multiply", "rope_and_write_kv", "paged_attention")
_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")


def operations_of_head(kind: MatrixKind) -> tuple[str, ...]:
    products = ("quantized_linear", "unpack_rows") if kind is MatrixKind.PACKED else ()
    return (*_IN_FLOAT32, *products)


class Eagle3Head:
    """A head with its weights, on the CPU; keys and values are float32."""

    def __init__(self, checkpoint: Eagle3Checkpoint, embed: Embedding, max_model_len: int, kind: MatrixKind) -> None:
        """Read all weights, for positions below `max_model_len`. embed: the target's, for a head without its own.

        Packed matrices have 8 bits, where their inputs come in groups of 32. Raises ModelCorruptError.
        """
        self._config = checkpoint.config
        self._is_packed = kind is MatrixKind.PACKED
        self._embed = self._own_embedding(checkpoint.embedding()) if checkpoint.has_embedding else embed
        self._rope_table = rope_tables(self._config.layer, max_model_len)[0][0]

        def linear(*names: str) -> Linear:
            return self._linear(np.concatenate([checkpoint.tensor(f"{name}.weight") for name in names]))

        def norm(name: str) -> torch.Tensor:
            return torch.from_numpy(checkpoint.tensor(f"{name}.weight"))

        self._reduce = linear("fc")
        self._token_norm, self._feature_norm = norm("midlayer.input_layernorm"), norm("midlayer.hidden_norm")
        self._qkv = linear(*(f"midlayer.{name}" for name in _QKV))
        self._attention_output = linear("midlayer.self_attn.o_proj")
        self._feed_forward_norm = norm("midlayer.post_attention_layernorm")
        self._gate_up = linear("midlayer.mlp.gate_proj", "midlayer.mlp.up_proj")
        self._down = linear("midlayer.mlp.down_proj")
        self._final_norm = norm("norm")
        self._lm_head = linear("lm_head")

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """states: [num_tokens, layers of the target, its hidden], float32. Returns [num_tokens, hidden]."""
        return self._reduce(states.reshape(states.shape[0], -1), Splits.EVEN)

    def write(
        self,
        features: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache: KvCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of features, [num_tokens, hidden], and the tokens that follow them, to their slots.

        The others as in `ForwardInputs`; kv_cache: of one layer, float32. Returns the features, normalised, and
        [num_tokens, num_heads + 2 * num_kv_heads, head_dim], whose queries are rotated. Raises KernelArgumentError as
        `LanguageModel.forward` does.
        """
        eps = self._config.layer.rms_norm_eps
        normed = rms_norm(features, self._feature_norm, eps)
        tokens = rms_norm(self._embed(token_ids), self._token_norm, eps)
        both = torch.from_numpy(np.concatenate((tokens.numpy(), normed.numpy()), axis=1))
        qkv = self._qkv(both, Splits.EVEN).view(both.shape[0], -1, self._config.layer.head_dim)
        rope_and_write_kv(qkv, self._rope_table, positions, slot_mapping, kv_cache.keys, kv_cache.values)
        return normed, qkv

    def forward(
        self, features: torch.Tensor, inputs: ForwardInputs, kv_cache: KvCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the same; returns the features of the next positions and the logits for those after.

        They are [num_logits, hidden] and [num_logits, draft vocabulary]. The tokens that `inputs` wants logits of must
        be the last ones of different rows.
        """
        layer, eps = self._config.layer, self._config.layer.rms_norm_eps
        normed, qkv = self.write(features, inputs.token_ids, inputs.positions, inputs.slot_mapping, kv_cache)
        attended = self._attend(take_rows(qkv.flatten(1), inputs.logit_tokens), inputs, kv_cache)
        stream = take_rows(normed if self._config.norm_before_residual else features, inputs.logit_tokens)
        hidden = rms_norm(attended, self._feed_forward_norm, eps, residual=stream)
        gated = gate_and_multiply(self._gate_up(hidden, Splits.EVEN), GATES[layer.activation])
        hidden = rms_norm(self._down(gated, Splits.EVEN), self._final_norm, eps, residual=stream)
        return stream, self._lm_head(hidden, Splits.EVEN)

    def _attend(self, qkv: torch.Tensor, inputs: ForwardInputs, kv_cache: KvCache) -> torch.Tensor:
        """qkv: [num_logits, ...], queries rotated. Returns [num_logits, hidden]."""
        layer, wanted = self._config.layer, inputs.logit_tokens.numpy()
        rows = np.searchsorted(inputs.cu_seqlens.numpy(), wanted, side="right") - 1
        attended = paged_attention(
            qkv.view(wanted.size, -1, layer.head_dim)[:, : layer.num_heads],
            kv_cache.keys,
            kv_cache.values,
            torch.from_numpy(inputs.block_tables.numpy()[rows]),
            torch.arange(wanted.size + 1, dtype=torch.int32),
            torch.from_numpy(inputs.context_lens.numpy()[rows]),
            layer.head_dim**-0.5,
        )
        return self._attention_output(attended.view(wanted.size, -1), Splits.EVEN)

    def _own_embedding(self, table: Float32Array) -> Embedding:
        if self._is_packed and table.shape[1] % GROUP == 0:
            packed = pack_int8(*quantize(table))
            return lambda token_ids: unpack_rows(packed, token_ids)
        dense = torch.from_numpy(table)
        return lambda token_ids: take_rows(dense, token_ids)

    def _linear(self, matrix: Float32Array) -> Linear:
        if self._is_packed and matrix.shape[1] % GROUP == 0:
            return PackedLinear(pack_int8(*quantize(matrix)))
        return DenseLinear(torch.from_numpy(matrix))
