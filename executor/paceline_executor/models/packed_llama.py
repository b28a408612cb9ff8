"""The Llama architecture and its relatives with packed weights: the layers of `llama`, computed by one call per step.

Knows which tensors go together and how each kind of stored weight is packed.
"""

from collections.abc import Callable

import numpy as np
import structlog
import torch

from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import DOWN, GATE_UP, OUTPUT, QKV, HostWeights, LayerReader
from paceline_executor.models.llama import GATES
from paceline_executor.models.rope import rope_tables
from paceline_executor.weights.checkpoint import Checkpoint
from paceline_executor.weights.grouped_rows import GroupedTensor
from paceline_executor.weights.quantized_rows import Int4Rows, Int8Rows, QuantizedRows
from paceline_kernels.decoder import AuxHidden, Decoder, DecoderLayer, DecoderWeights, HeadNorms, PhaseTime, PostNorms
from paceline_kernels.quantized_linear import PackedWeight, pack_int4, pack_int8, quantize, unpack_rows


class PackedLlamaModel:
    """See `LanguageModel`."""

    def __init__(self, checkpoint: Checkpoint, max_model_len: int) -> None:
        config, weights = checkpoint.config, HostWeights(checkpoint)
        in_8_bits: list[tuple[str, bool]] = []
        note = in_8_bits.append
        self._embedding = embedding = read_packed(checkpoint, ("model.embed_tokens.weight",), note)
        tables, table_of_layer = rope_tables(config, max_model_len)
        self._decoder = Decoder(
            DecoderWeights(
                embedding=embedding,
                layers=tuple(
                    _read_layer(checkpoint, LayerReader(weights, layer), table, note)
                    for layer, table in enumerate(table_of_layer)
                ),
                final_norm=weights.norm("model.norm.weight"),
                lm_head=embedding if config.tie_word_embeddings else read_packed(checkpoint, ("lm_head.weight",), note),
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
        )
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

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return unpack_rows(self._embedding, token_ids)


def read_packed(
    checkpoint: Checkpoint, names: tuple[str, ...], note: Callable[[tuple[str, bool]], None] = lambda _: None
) -> PackedWeight:
    """The matrices take the same input; their outputs are side by side.

    What is stored in groups of 32 keeps its integers and scales. Anything else, and matrices stored in different ways,
    becomes 8 bits per weight with a scale for each group: `note` is told their names, and whether they kept their
    numbers.
    """
    stored = [checkpoint.quantized(name) for name in names]
    int4 = [rows for rows in stored if isinstance(rows, Int4Rows)]
    if len(int4) == len(names):
        columns = ([getattr(rows, part) for rows in int4] for part in ("integers", "scales", "minima"))
        return pack_int4(*(np.concatenate(parts) for parts in columns))
    for name, part in zip(names, stored, strict=True):
        note((name, isinstance(part, Int8Rows)))
    rows = [_as_int8(checkpoint, name, part) for name, part in zip(names, stored, strict=True)]
    return pack_int8(*(np.concatenate(parts) for parts in zip(*((r.integers, r.scales) for r in rows), strict=True)))


def _as_int8(checkpoint: Checkpoint, name: str, stored: QuantizedRows | None) -> Int8Rows:
    return stored if isinstance(stored, Int8Rows) else Int8Rows(*quantize(checkpoint.tensor(name)))


def _tell_of_8_bits(checkpoint: Checkpoint, in_8_bits: list[tuple[str, bool]]) -> None:
    """Once for a model whose file has quantised matrices that are not held in their own bits and numbers."""
    if not checkpoint.quantization:
        return
    found = [
        (tensor, exact) for name, exact in in_8_bits if isinstance(tensor := checkpoint.stored(name), GroupedTensor)
    ]
    changed = [(tensor.stored, exact) for tensor, exact in found if tensor.stored.bits < 8 or not exact]
    if changed:
        structlog.get_logger().info(
            "weights_in_8_bits",
            stored=", ".join(sorted({stored.name for stored, _ in changed})),
            matrices=len(changed),
            rounded=sum(not exact for _, exact in changed),
            bits_per_weight=8.5,
            off_by_at_most="1/254 of the largest of 32 weights",
            exact_with="--quantization none",
        )


def _read_layer(
    checkpoint: Checkpoint, reader: LayerReader, rope_table: int, note: Callable[[tuple[str, bool]], None]
) -> DecoderLayer:
    config = checkpoint.config

    def packed(*parts: str) -> PackedWeight:
        return read_packed(checkpoint, reader.names(*parts), note)

    return DecoderLayer(
        attention_norm=reader.norm("input_layernorm"),
        qkv=packed(*QKV),
        attention_output=packed(*OUTPUT),
        feed_forward_norm=reader.feed_forward_norm(),
        gate_up=packed(*GATE_UP),
        down=packed(*DOWN),
        qkv_bias=reader.bias(*QKV),
        attention_output_bias=reader.bias(*OUTPUT),
        gate_up_bias=reader.bias(*GATE_UP),
        down_bias=reader.bias(*DOWN),
        head_norms=_head_norms(reader) if config.qk_norm else None,
        post_norms=_post_norms(reader) if config.post_norms else None,
        rope_table=rope_table,
        window=config.window(reader.layer),
    )


def _head_norms(reader: LayerReader) -> HeadNorms:
    return HeadNorms(reader.norm("self_attn.q_norm"), reader.norm("self_attn.k_norm"))


def _post_norms(reader: LayerReader) -> PostNorms:
    return PostNorms(reader.norm("post_attention_layernorm"), reader.norm("post_feedforward_layernorm"))
