"""The head of EAGLE-3: one layer that guesses the next token but one from hidden states of a target and the next token.

Knows the order of operations, and which weights go together. It refuses to know which positions are computed when, and
how tokens are drawn (`speculation.eagle3` and `runner.device.eagle3` do). No step looks at what tensors hold, as those
of a GPU are captured.

Li et al., 2025, https://arxiv.org/abs/2503.01840. A *feature* is what a target's hidden states are reduced to, or what
the head itself returned for the position before. It goes with the token that follows it, at its own position.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import DenseLinear, Linear, PackedLinear, ScaledLinear
from paceline_executor.models.llama import GATES
from paceline_executor.models.rope import rope_tables
from paceline_executor.numerics import MatrixKind
from paceline_executor.weights.hf.eagle3 import EMBEDDING, Eagle3Checkpoint
from paceline_executor.weights.hf.eagle3_config import Eagle3Config
from paceline_kernels.activation import gate_and_multiply
from paceline_kernels.attention import Splits, paged_attention
from paceline_kernels.quantized_linear import pack_int8, quantize, unpack_rows
from paceline_kernels.quantized_linear.packing import GROUP
from paceline_kernels.rms_norm import rms_norm
from paceline_kernels.rope import rope_and_write_kv
from paceline_kernels.scaled_linear import quantize_rows
from paceline_kernels.take_rows import take_rows

Embedding = Callable[[torch.Tensor], torch.Tensor]
HeadTensors = Callable[[str], torch.Tensor]  # by published name, on the device, of the type that is computed with

_QKV = tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")
_IN_FLOAT32 = ("linear", "rms_norm", "add_rms_norm", "gate_and_multiply", "rope_and_write_kv", "paged_attention")


def operations_of_head(kind: MatrixKind) -> tuple[str, ...]:
    """On a CPU."""
    products = ("quantized_linear", "unpack_rows") if kind is MatrixKind.PACKED else ()
    return (*_IN_FLOAT32, *products)


def read_head(
    checkpoint: Eagle3Checkpoint,
    embed: Embedding,
    max_model_len: int,
    kind: MatrixKind,
    device: torch.device = torch.device("cpu"),  # noqa: B008  # a value
    dtype: torch.dtype = torch.float32,
) -> "Eagle3Head":
    """embed: the target's, for a head without its own. Raises ModelCorruptError."""

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(checkpoint.tensor(name)).to(device, dtype)

    return Eagle3Head(checkpoint.config, tensor, None if checkpoint.has_embedding else embed, max_model_len, kind)


class Eagle3Head:
    """Keys and values are of the type that is computed with."""

    def __init__(
        self, config: Eagle3Config, tensors: HeadTensors, embed: Embedding | None, max_model_len: int, kind: MatrixKind
    ) -> None:
        """For positions below `max_model_len`. embed: the target's; None is the head's own. kind: of matrices; packed
        ones have 8 bits, where their inputs come in groups of 32.
        """
        self.config = config

        def linear(*names: str) -> Linear:
            return _linear(_joined([tensors(name) for name in names], dim=0), kind)

        self._embed = embed or _own_embedding(tensors(EMBEDDING), kind)
        self._reduce = linear("fc.weight")
        self._token_norm = tensors("midlayer.input_layernorm.weight")
        self._feature_norm = tensors("midlayer.hidden_norm.weight")
        self._qkv = linear(*_QKV)
        self._attention_output = linear("midlayer.self_attn.o_proj.weight")
        self._feed_forward_norm = tensors("midlayer.post_attention_layernorm.weight")
        self._gate_up = linear("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight")
        self._down = linear("midlayer.mlp.down_proj.weight")
        self._final_norm = tensors("norm.weight")
        self._lm_head = linear("lm_head.weight")
        self._rope_table = rope_tables(config.layer, max_model_len)[0][0].to(self.device)

    @property
    def device(self) -> torch.device:
        return self._final_norm.device

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """states: [num_tokens, layers of the target, its hidden]. Returns [num_tokens, hidden]."""
        return self._reduce(states.flatten(1), Splits.EVEN)

    def write(
        self,
        features: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache: KvCache,
        splits: Splits = Splits.EVEN,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of features, [num_tokens, hidden], and the tokens that follow them, to their slots.

        The others as in `ForwardInputs`; kv_cache: of one layer. Returns the features, normalised, and [num_tokens,
        num_heads + 2 * num_kv_heads, head_dim], whose queries are rotated. Raises KernelArgumentError as
        `LanguageModel.forward` does.
        """
        eps = self.config.layer.rms_norm_eps
        normed = rms_norm(features, self._feature_norm, eps)
        both = _joined((rms_norm(self._embed(token_ids), self._token_norm, eps), normed), dim=1)
        qkv = self._qkv(both, splits).view(both.shape[0], -1, self.config.layer.head_dim)
        rope_and_write_kv(qkv, self._rope_table, positions, slot_mapping, kv_cache.keys, kv_cache.values)
        return normed, qkv

    def forward(
        self, features: torch.Tensor, inputs: ForwardInputs, kv_cache: KvCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the same; each token of `inputs` is the one behind its position.

        Returns what `logit_tokens`, the last ones of different rows, get: the features of the positions behind, and
        what `logits` takes.
        """
        layer, eps, wanted = self.config.layer, self.config.layer.rms_norm_eps, inputs.logit_tokens
        slots = inputs.token_ids, inputs.positions, inputs.slot_mapping
        normed, qkv = self.write(features, *slots, kv_cache, inputs.splits)
        attended = self._attend(take_rows(qkv.flatten(1), wanted), inputs, kv_cache)
        stream = take_rows(normed if self.config.norm_before_residual else features, wanted)
        hidden = rms_norm(attended, self._feed_forward_norm, eps, residual=stream)
        gated = gate_and_multiply(self._gate_up(hidden, inputs.splits), GATES[layer.activation])
        return stream, rms_norm(self._down(gated, inputs.splits), self._final_norm, eps, residual=stream)

    def logits(self, hidden: torch.Tensor, splits: Splits) -> torch.Tensor:
        """Over the draft vocabulary."""
        return self._lm_head(hidden, splits)

    def _attend(self, qkv: torch.Tensor, inputs: ForwardInputs, kv_cache: KvCache) -> torch.Tensor:
        """qkv: of the wanted tokens, of which padding, behind the others, has no query."""
        layer, wanted = self.config.layer, inputs.logit_tokens
        num_wanted = wanted.shape[0]
        last_row = inputs.context_lens.shape[0] - 1
        rows = torch.searchsorted(inputs.cu_seqlens, wanted, right=True).sub(1).clamp(0, last_row)
        ends = torch.arange(num_wanted + 1, dtype=torch.int32, device=wanted.device)
        attended = paged_attention(
            qkv.view(num_wanted, -1, layer.head_dim)[:, : layer.num_heads],
            kv_cache.keys,
            kv_cache.values,
            inputs.block_tables[rows],
            torch.minimum(ends, (wanted >= 0).sum().int()),
            inputs.context_lens[rows],
            layer.head_dim**-0.5,
            splits=inputs.splits,
            max_query_len=1,
        )
        return self._attention_output(attended.view(num_wanted, -1), inputs.splits)


def _own_embedding(table: torch.Tensor, kind: MatrixKind) -> Embedding:
    if kind is MatrixKind.PACKED and table.shape[1] % GROUP == 0:
        packed = pack_int8(*quantize(table.numpy()))
        return lambda token_ids: unpack_rows(packed, token_ids)
    return lambda token_ids: take_rows(table, token_ids)


def _linear(matrix: torch.Tensor, kind: MatrixKind) -> Linear:
    if kind is MatrixKind.FLOAT8:
        return ScaledLinear(quantize_rows(matrix, torch.float8_e4m3fn), None)
    if kind is MatrixKind.PACKED and matrix.shape[1] % GROUP == 0:
        return PackedLinear(pack_int8(*quantize(matrix.numpy())))
    return DenseLinear(matrix)


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """On a CPU not by torch, which would do it with threads of its own."""
    if parts[0].device.type == "cpu" and parts[0].dtype == torch.float32:
        return torch.from_numpy(np.concatenate([part.numpy() for part in parts], axis=dim))
    return torch.cat(tuple(parts), dim=dim)
