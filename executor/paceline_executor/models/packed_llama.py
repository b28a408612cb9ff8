"""The Llama architecture with its weights packed: the same layers as `llama`, computed by one call per step.

Knows which tensors go together and how each kind of stored weight is packed. The arithmetic is
`paceline_kernels.decoder`'s.
"""

import numpy as np
import torch

from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import read_tensor
from paceline_executor.weights.checkpoint import Checkpoint
from paceline_executor.weights.quantized_rows import Int4Rows, Int8Rows, QuantizedRows
from paceline_kernels.decoder import Decoder, DecoderBatch, DecoderLayer, DecoderWeights
from paceline_kernels.quantized_linear import PackedWeight, pack_int4, pack_int8, quantize
from paceline_kernels.rope import rope_table


class PackedLlamaModel:
    """A Llama-architecture model, see `Model`."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, max_model_len: int) -> None:
        config = checkpoint.config
        embedding = read_packed(checkpoint, ("model.embed_tokens.weight",))
        self._decoder = Decoder(
            DecoderWeights(
                embedding=embedding,
                layers=tuple(_read_layer(checkpoint, layer, device) for layer in range(config.num_layers)),
                final_norm=read_tensor(checkpoint, "model.norm.weight", device),
                lm_head=embedding if config.tie_word_embeddings else read_packed(checkpoint, ("lm_head.weight",)),
                rope_table=rope_table(max_model_len, config.head_dim, config.rope_theta).to(device),
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                rms_norm_eps=config.rms_norm_eps,
            )
        )

    def forward(self, inputs: ForwardInputs, kv_cache: KvCache) -> torch.Tensor:
        """See `Model.forward`."""
        batch = DecoderBatch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            cu_seqlens=inputs.cu_seqlens,
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
            logit_tokens=inputs.logit_tokens,
        )
        return self._decoder.forward(batch, kv_cache.keys, kv_cache.values)


def read_packed(checkpoint: Checkpoint, names: tuple[str, ...]) -> PackedWeight:
    """One matrix for those that take the same input, their outputs side by side.

    What is stored in groups of 32 keeps its integers and scales as they are. Anything else, and matrices stored in
    different ways, becomes 8 bits per weight with a scale for each group.
    """
    stored = [checkpoint.quantized(name) for name in names]
    int4 = [rows for rows in stored if isinstance(rows, Int4Rows)]
    if len(int4) == len(names):
        columns = ([getattr(rows, part) for rows in int4] for part in ("integers", "scales", "minima"))
        return pack_int4(*(np.concatenate(parts) for parts in columns))
    rows = [_as_int8(checkpoint, name, part) for name, part in zip(names, stored, strict=True)]
    return pack_int8(*(np.concatenate(parts) for parts in zip(*((r.integers, r.scales) for r in rows), strict=True)))


def _as_int8(checkpoint: Checkpoint, name: str, stored: QuantizedRows | None) -> Int8Rows:
    return stored if isinstance(stored, Int8Rows) else Int8Rows(*quantize(checkpoint.tensor(name)))


def _read_layer(checkpoint: Checkpoint, layer: int, device: torch.device) -> DecoderLayer:
    prefix = f"model.layers.{layer}."

    def packed(*names: str) -> PackedWeight:
        return read_packed(checkpoint, tuple(f"{prefix}{name}.weight" for name in names))

    return DecoderLayer(
        attention_norm=read_tensor(checkpoint, f"{prefix}input_layernorm.weight", device),
        qkv=packed("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_output=packed("self_attn.o_proj"),
        feed_forward_norm=read_tensor(checkpoint, f"{prefix}post_attention_layernorm.weight", device),
        gate_up=packed("mlp.gate_proj", "mlp.up_proj"),
        down=packed("mlp.down_proj"),
    )
