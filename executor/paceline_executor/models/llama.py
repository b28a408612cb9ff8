"""The Llama architecture and its relatives: pre-norm layers of grouped-query attention and a gated feed-forward net.

What distinguishes Mistral, Qwen and Gemma from it is in the configuration; what a layer does without is None. Knows the
order of operations. Refuses to know how they are computed, and how a batch came to be.

Touvron et al., 2023, https://arxiv.org/abs/2302.13971; grouped queries: Ainslie et al., 2023,
https://arxiv.org/abs/2305.13245; norms of queries and keys, and after a block: Gemma 2 and 3,
https://arxiv.org/abs/2408.00118 and https://arxiv.org/abs/2503.19786.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline_executor.models.collectives import Collectives, GatheredLinear, summed
from paceline_executor.models.feed_forward import GatedFeedForward, MixtureFeedForward, read_feed_forward
from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import (
    OUTPUT,
    DenseLinear,
    LayerReader,
    Linear,
    Weights,
    normalised_linear,
)
from paceline_executor.models.rope import rope_tables
from paceline_executor.weights.checkpoint import Activation
from paceline_kernels.activation import Gate, softcap
from paceline_kernels.attention import GOOD_SHORT_QUERIES, Splits, paged_attention
from paceline_kernels.decoder import AuxHidden, PhaseTime
from paceline_kernels.devices import is_cpu
from paceline_kernels.rms_norm import rms_norm
from paceline_kernels.rope import HeadNorms, rope_and_write_kv
from paceline_kernels.sampling import VocabularySlice
from paceline_kernels.take_rows import take_rows

GATES: Mapping[Activation, Gate] = {Activation.SILU: Gate.SILU, Activation.GELU_TANH: Gate.GELU_TANH}


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    attention_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values
    head_norms: HeadNorms | None
    row_norms: tuple[torch.Tensor, torch.Tensor] | None  # of all query heads, and all key heads, of a token
    rope_table: torch.Tensor  # [max_model_len, head_dim]
    window: int | None
    attention_output: Linear  # num_heads * head_dim -> hidden
    attention_post_norm: torch.Tensor | None  # [hidden] of what attention adds
    feed_forward_norm: torch.Tensor  # [hidden]
    feed_forward: GatedFeedForward | MixtureFeedForward
    feed_forward_post_norm: torch.Tensor | None  # [hidden] of what the feed-forward network adds


class LlamaModel:
    """See `LanguageModel`."""

    def __init__(self, weights: Weights, max_model_len: int, collectives: Collectives | None = None) -> None:
        """Serves positions below `max_model_len`. collectives: of ranks, each with its part of the layers' weights."""
        config = weights.config
        self._config = config
        self._embedding = weights.dense("model.embed_tokens.weight")
        tables, table_of_layer = rope_tables(config, max_model_len)
        self._rope_tables = tables.to(self._embedding.device)
        self._layers = [
            _read_layer(LayerReader(weights, layer), self._rope_tables[table], collectives)
            for layer, table in enumerate(table_of_layer)
        ]
        self._final_norm = weights.norm("model.norm.weight")
        tied = config.tie_word_embeddings
        rows = config.scored_rows
        self._lm_head: Linear = DenseLinear(self._embedding[rows]) if tied else weights.linear(("lm_head.weight",))
        self.vocabulary = None
        if collectives is not None and is_cpu(self._embedding.device):
            self.vocabulary = VocabularySlice(config.vocab_size, rows.start, collectives.rank, collectives.gather)
        elif collectives is not None:
            self._lm_head = GatheredLinear(self._lm_head, config.vocab_size, collectives)

    @property
    def weight_bytes(self) -> int:
        matrices = [(one.qkv, one.attention_output, one.feed_forward) for one in self._layers]
        return self._lm_head.num_bytes + sum(matrix.num_bytes for layer in matrices for matrix in layer)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self._layers)

    def forward(
        self,
        inputs: ForwardInputs,
        kv_cache: KvCache,
        *,
        aux: AuxHidden | None = None,
        times: list[PhaseTime] | None = None,  # noqa: ARG002  of its operations none is timed
    ) -> torch.Tensor:
        return self.logits(self.hidden(inputs, kv_cache, aux), inputs.splits)

    def hidden(self, inputs: ForwardInputs, kv_cache: KvCache, aux: AuxHidden | None = None) -> torch.Tensor:
        config, eps = self._config, self._config.rms_norm_eps
        # Every layer adds to the stream; the norms add the output of the layer before to it in passing.
        stream = take_rows(self._embedding, inputs.token_ids, config.embedding_scale)
        x, residual = stream, None
        for index, layer in enumerate(self._layers):
            qkv = normalised_linear(layer.qkv, x, layer.attention_norm, eps, inputs.splits, residual)
            if aux is not None and index in aux.layers:
                _put_states(aux.states[:, aux.layers.index(index)], stream)
            attended = self._attend(layer, qkv, inputs, kv_cache.layer(index))
            fed = layer.feed_forward(attended, layer.feed_forward_norm, eps, inputs.splits, stream)
            x, residual = self._normalised(fed, layer.feed_forward_post_norm), stream
        return take_rows(rms_norm(x, self._final_norm, eps, residual=residual), inputs.logit_tokens)

    def logits(self, hidden: torch.Tensor, splits: Splits) -> torch.Tensor:
        config = self._config
        logits = self._lm_head(hidden, splits)
        if config.logit_softcap is not None:
            softcap(logits, config.logit_softcap)
        return logits

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return take_rows(self._embedding, token_ids)

    def _normalised(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return x if norm is None else rms_norm(x, norm, self._config.rms_norm_eps)

    def _attend(self, layer: LlamaLayer, qkv: torch.Tensor, inputs: ForwardInputs, cache: KvCache) -> torch.Tensor:
        """Queries, keys and values of all heads side by side -> [num_tokens, hidden]."""
        config = self._config
        num_tokens, num_heads = qkv.shape[0], config.num_heads
        if layer.row_norms is not None:
            _normalise_rows(qkv, layer.row_norms, config.rms_norm_eps)
        num_kv_heads, scale = config.num_kv_heads, config.attention_scale or config.head_dim**-0.5
        qkv = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, config.head_dim)
        scales = {"key_scales": cache.key_scales, "value_scales": cache.value_scales}
        rope_and_write_kv(
            qkv,
            layer.rope_table,
            inputs.positions,
            inputs.slot_mapping,
            cache.keys,
            cache.values,
            norms=layer.head_norms,
            **scales,
        )
        attended = paged_attention(
            qkv[:, :num_heads],
            cache.keys,
            cache.values,
            inputs.block_tables,
            inputs.cu_seqlens,
            inputs.context_lens,
            scale,
            window=layer.window,
            softcap=config.attention_softcap,
            splits=inputs.splits,
            short_tokens=min(inputs.short_tokens, max(1, GOOD_SHORT_QUERIES // (num_heads // num_kv_heads))),
            max_query_len=inputs.max_query_len,
            **scales,
        )
        output = layer.attention_output(attended.view(num_tokens, num_heads * config.head_dim), inputs.splits)
        return self._normalised(output, layer.attention_post_norm)


def _normalise_rows(qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor], eps: float) -> None:
    """In place. qkv: [num_tokens, …], queries and keys first."""
    first = 0
    for norm in norms:
        part = qkv[:, first : first + norm.shape[0]]
        part.copy_(rms_norm(part.contiguous(), norm, eps))
        first += norm.shape[0]


def _put_states(states: torch.Tensor, stream: torch.Tensor) -> None:
    """On a CPU not by torch, which would copy with threads of its own."""
    if stream.device.type == "cpu" and stream.dtype == torch.float32:
        states.numpy()[:] = stream.numpy()
    else:
        states.copy_(stream)


def _read_layer(reader: LayerReader, rope_table: torch.Tensor, collectives: Collectives | None) -> LlamaLayer:
    config = reader.weights.config
    post_norms = config.post_norms
    return LlamaLayer(
        attention_norm=reader.norm("input_layernorm"),
        qkv=reader.qkv(),
        head_norms=_head_norms(reader) if config.qk_norm and not config.qk_norm_spans_heads else None,
        row_norms=_row_norms(reader) if config.qk_norm_spans_heads else None,
        rope_table=rope_table,
        window=config.window(reader.layer),
        attention_output=summed(reader, OUTPUT, collectives),
        attention_post_norm=reader.norm("post_attention_layernorm") if post_norms else None,
        feed_forward_norm=reader.feed_forward_norm(),
        feed_forward=read_feed_forward(reader, GATES[config.activation], collectives),
        feed_forward_post_norm=reader.norm("post_feedforward_layernorm") if post_norms else None,
    )


def _head_norms(reader: LayerReader) -> HeadNorms:
    norms = reader.head_norm("self_attn.q_norm"), reader.head_norm("self_attn.k_norm")
    return HeadNorms(*norms, reader.weights.config.rms_norm_eps)


def _row_norms(reader: LayerReader) -> tuple[torch.Tensor, torch.Tensor]:
    return reader.norm("self_attn.q_norm"), reader.norm("self_attn.k_norm")
