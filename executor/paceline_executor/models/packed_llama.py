"""The Llama architecture and its relatives with packed weights: the layers of `llama`, computed by one call per step.

Knows which tensors go together and how each kind of stored weight is packed.
"""

from collections.abc import Sequence

import numpy as np
import structlog
import torch

from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import DOWN, GATE_UP, OUTPUT, QKV, HostWeights, LayerReader
from paceline_executor.models.llama import GATES
from paceline_executor.models.packed_matrix import PackedMatrix, read_packed
from paceline_executor.models.rope import rope_tables
from paceline_executor.weights.checkpoint import Checkpoint
from paceline_executor.weights.grouped_rows import IntArray
from paceline_kernels.decoder import (
    AuxHidden,
    Decoder,
    DecoderLayer,
    DecoderWeights,
    HeadNormWeights,
    InputOrders,
    PhaseTime,
    PostNorms,
)
from paceline_kernels.quantized_linear import PackedWeight, unpack_rows


class PackedLlamaModel:
    """See `LanguageModel`."""

    vocabulary = None

    def __init__(self, checkpoint: Checkpoint, max_model_len: int) -> None:
        config, weights, in_8_bits = checkpoint.config, HostWeights(checkpoint), list[str]()
        embedding = _in_own_order(checkpoint, "model.embed_tokens.weight", in_8_bits)
        tables, table_of_layer = rope_tables(config, max_model_len)
        layers = [
            _read_layer(checkpoint, LayerReader(weights, layer), table, in_8_bits)
            for layer, table in enumerate(table_of_layer)
        ]
        tied = config.tie_word_embeddings
        self._weights = DecoderWeights(
            embedding=embedding,
            layers=tuple(layers),
            final_norm=weights.norm("model.norm.weight"),
            lm_head=embedding if tied else _in_own_order(checkpoint, "lm_head.weight", in_8_bits),
            rope_tables=tables,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            gate=GATES[config.activation],
            embedding_scale=config.embedding_scale,
            attention_scale=config.attention_scale,
            attention_softcap=config.attention_softcap,
            logit_softcap=config.logit_softcap,
        )
        self._decoder = Decoder(self._weights)
        _tell_of_8_bits(checkpoint, in_8_bits)

    def forward(
        self,
        inputs: ForwardInputs,
        kv_cache: KvCache,
        *,
        aux: AuxHidden | None = None,
        times: list[PhaseTime] | None = None,
    ) -> torch.Tensor:
        return self._decoder.forward(inputs, kv_cache.keys, kv_cache.values, aux=aux, times=times)

    @property
    def num_bytes(self) -> int:
        """Of its matrices."""
        return self._weights.num_bytes

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return unpack_rows(self._weights.embedding, token_ids)


def _in_own_order(checkpoint: Checkpoint, name: str, in_8_bits: list[str]) -> PackedWeight:
    """Of a matrix that no layer orders inputs for."""
    matrix = read_packed(checkpoint, (name,), keeps_order=True)
    in_8_bits.extend(matrix.in_8_bits)
    return matrix.weight


def _tell_of_8_bits(checkpoint: Checkpoint, in_8_bits: Sequence[str]) -> None:
    """Once for a model whose file has quantised matrices that are held otherwise."""
    if in_8_bits:
        structlog.get_logger().info(
            "weights_in_8_bits",
            stored=", ".join(sorted({checkpoint.stored(name).stored.name for name in in_8_bits})),
            matrices=len(in_8_bits),
            bits_per_weight=8.5,
            off_by_at_most="1/254 of the largest of 32 weights",
            exact_with="--quantization none",
        )


def _read_layer(checkpoint: Checkpoint, reader: LayerReader, rope_table: int, in_8_bits: list[str]) -> DecoderLayer:
    config = checkpoint.config

    def packed(*parts: str, rows: IntArray | None = None) -> PackedMatrix:
        matrix = read_packed(checkpoint, reader.names(*parts), rows)
        in_8_bits.extend(matrix.in_8_bits)
        return matrix

    # The inputs of `down` are the outputs of `gate_up`, which may come in its order.
    down = packed(*DOWN)
    fed = None if down.order is None else down.order.numpy().astype(np.intp)
    qkv, output, gate_up = packed(*QKV), packed(*OUTPUT), packed(*GATE_UP, rows=fed)
    gate_up_bias = reader.bias(*GATE_UP)
    if gate_up_bias is not None and down.order is not None:
        gate_up_bias = gate_up_bias.view(2, -1)[:, down.order.long()].flatten().contiguous()
    return DecoderLayer(
        attention_norm=reader.norm("input_layernorm"),
        qkv=qkv.weight,
        attention_output=output.weight,
        feed_forward_norm=reader.feed_forward_norm(),
        gate_up=gate_up.weight,
        down=down.weight,
        qkv_bias=reader.bias(*QKV),
        attention_output_bias=reader.bias(*OUTPUT),
        gate_up_bias=gate_up_bias,
        down_bias=reader.bias(*DOWN),
        head_norms=_head_norms(reader) if config.qk_norm else None,
        post_norms=_post_norms(reader) if config.post_norms else None,
        orders=InputOrders(qkv.order, output.order, gate_up.order),
        rope_table=rope_table,
        window=config.window(reader.layer),
    )


def _head_norms(reader: LayerReader) -> HeadNormWeights:
    return HeadNormWeights(reader.norm("self_attn.q_norm"), reader.norm("self_attn.k_norm"))


def _post_norms(reader: LayerReader) -> PostNorms:
    return PostNorms(reader.norm("post_attention_layernorm"), reader.norm("post_feedforward_layernorm"))
