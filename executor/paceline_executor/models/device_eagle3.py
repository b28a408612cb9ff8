"""The head of EAGLE-3 on a device: `models.eagle3` has the same one on the CPU.

Apart from it, because no step of this one looks at what tensors hold: it is captured. Knows no rows.
"""

from collections.abc import Callable

import torch

from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import DenseLinear, Linear, ScaledLinear
from paceline_executor.models.llama import GATES
from paceline_executor.models.rope import rope_tables
from paceline_executor.weights.hf.eagle3_config import Eagle3Config
from paceline_kernels.activation import gate_and_multiply
from paceline_kernels.attention import Splits, paged_attention
from paceline_kernels.rms_norm import rms_norm
from paceline_kernels.rope import rope_and_write_kv
from paceline_kernels.scaled_linear import quantize_rows
from paceline_kernels.take_rows import take_rows

Embedding = Callable[[torch.Tensor], torch.Tensor]
HeadTensors = Callable[[str], torch.Tensor]  # by published name, on the device, of the type that is computed with

_QKV = tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")
EMBEDDING = "embed_tokens.weight"


class DeviceEagle3Head:
    """See `Eagle3Head`; keys and values are of the type that is computed with."""

    def __init__(
        self,
        config: Eagle3Config,
        tensors: HeadTensors,
        embed: Embedding | None,
        max_model_len: int,
        *,
        is_float8: bool = False,
    ) -> None:
        """embed: the target's; None is the head's own. is_float8: its matrices."""
        self.config = config

        def linear(*names: str) -> Linear:
            matrix = torch.cat([tensors(name) for name in names])
            if is_float8:
                return ScaledLinear(quantize_rows(matrix, torch.float8_e4m3fn), None)
            return DenseLinear(matrix)

        self._embed = embed or _own_embedding(tensors(EMBEDDING))
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

    def forward(
        self, features: torch.Tensor, inputs: ForwardInputs, kv_cache: KvCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """features: [num_tokens, hidden]. inputs: each token is the one behind its position. kv_cache: of one layer.

        Returns what `logit_tokens`, of different rows, get: the features of the positions behind, and what `logits`
        takes.
        """
        layer, eps, wanted = self.config.layer, self.config.layer.rms_norm_eps, inputs.logit_tokens
        normed = rms_norm(features, self._feature_norm, eps)
        both = torch.cat((rms_norm(self._embed(inputs.token_ids), self._token_norm, eps), normed), dim=1)
        qkv = self._qkv(both, inputs.splits).view(both.shape[0], -1, layer.head_dim)
        rope_and_write_kv(qkv, self._rope_table, inputs.positions, inputs.slot_mapping, kv_cache.keys, kv_cache.values)
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


def _own_embedding(table: torch.Tensor) -> Embedding:
    return lambda token_ids: take_rows(table, token_ids)
