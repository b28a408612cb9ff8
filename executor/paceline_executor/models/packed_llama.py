"""The Llama architecture and its relatives with packed weights: the layers of `llama`, computed by one call per step.

Knows which tensors go together and how each kind of stored weight is packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import structlog
import torch

from paceline_executor.errors import UnsupportedModelError
from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import DOWN, GATE_UP, OUTPUT, QKV, HostWeights, LayerReader
from paceline_executor.models.llama import GATES
from paceline_executor.models.packed_matrix import PackedMatrix, read_packed
from paceline_executor.models.rope import head_order, rope_tables
from paceline_executor.weights.checkpoint import Checkpoint, Mixture, ModelConfig
from paceline_executor.weights.grouped_rows import IntArray
from paceline_kernels.decoder import (
    AuxHidden,
    Decoder,
    DecoderLayer,
    DecoderWeights,
    Experts,
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
        config, weights, packer = checkpoint.config, HostWeights(checkpoint), _Packer(checkpoint, [])
        embedding = packer.read(("model.embed_tokens.weight",), keeps_order=True).weight
        tables, table_of_layer = rope_tables(config, max_model_len)
        layers = [_read_layer(packer, LayerReader(weights, layer), table) for layer, table in enumerate(table_of_layer)]
        tied = config.tie_word_embeddings
        lm_head = embedding if tied else packer.read(("lm_head.weight",), keeps_order=True).weight
        self._weights = DecoderWeights(
            embedding=embedding,
            layers=tuple(layers),
            final_norm=weights.norm("model.norm.weight"),
            lm_head=lm_head,
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
        self._sparse_layers = [place for place, layer in enumerate(layers) if layer.experts is not None]
        self._num_steps = 0
        self._tokens_of_experts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        _tell_of_8_bits(checkpoint, packer.in_8_bits)

    def forward(
        self,
        inputs: ForwardInputs,
        kv_cache: KvCache,
        *,
        aux: AuxHidden | None = None,
        times: list[PhaseTime] | None = None,
    ) -> torch.Tensor:
        logits = self._decoder.forward(inputs, kv_cache.keys, kv_cache.values, aux=aux, times=times)
        if self._sparse_layers:
            layer = self._sparse_layers[self._num_steps % len(self._sparse_layers)]
            self._tokens_of_experts = self._decoder.tokens_of_experts(layer, inputs.token_ids.shape[0])
            self._num_steps += 1
        return logits

    def expert_load_ratio(self) -> float | None:
        """In the last step, the most tokens that an expert of a layer got by the mean of that layer's, layers by turns;
        None before the first one, and without a mixture. Any thread may ask.
        """
        tokens = self._tokens_of_experts
        return float(tokens.max() / tokens.mean()) if tokens.any() else None

    @property
    def num_bytes(self) -> int:
        """Of its matrices."""
        return self._weights.num_bytes

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return unpack_rows(self._weights.embedding, token_ids)


@dataclass(frozen=True, slots=True)
class _Packer:
    checkpoint: Checkpoint
    in_8_bits: list[str]  # of those that were read, stored otherwise

    def read(
        self, names: tuple[str, ...], orders: Sequence[IntArray | None] = (), *, keeps_order: bool = False
    ) -> PackedMatrix:
        """See `read_packed`."""
        matrix = read_packed(self.checkpoint, names, orders, keeps_order=keeps_order)
        self.in_8_bits.extend(matrix.in_8_bits)
        return matrix


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


def _read_layer(packer: _Packer, reader: LayerReader, rope_table: int) -> DecoderLayer:
    config = packer.checkpoint.config
    qkv, output = packer.read(reader.names(*QKV), _orders_of_heads(config)), packer.read(reader.names(*OUTPUT))
    layer = DecoderLayer(
        attention_norm=reader.norm("input_layernorm"),
        qkv=qkv.weight,
        attention_output=output.weight,
        feed_forward_norm=reader.feed_forward_norm(),
        gate_up=None,
        down=None,
        qkv_bias=_qkv_bias(reader),
        attention_output_bias=reader.bias(*OUTPUT),
        head_norms=_head_norms(reader) if config.qk_norm else None,
        post_norms=_post_norms(reader) if config.post_norms else None,
        orders=InputOrders(qkv.order, output.order),
        rope_table=rope_table,
        window=config.window(reader.layer),
    )
    mixture = config.experts if config.is_sparse(reader.layer) else None
    if mixture is None:
        return _with_network(layer, packer, reader)
    experts = _read_experts(mixture, packer, reader)
    if not mixture.shared_intermediate_size:
        return replace(layer, experts=experts)
    gate_up, down = _read_network(packer, reader, "mlp.shared_expert", keeps_order=True)
    return replace(layer, gate_up=gate_up.weight, down=down.weight, experts=experts)


def _with_network(layer: DecoderLayer, packer: _Packer, reader: LayerReader) -> DecoderLayer:
    """One for all tokens."""
    gate_up, down = _read_network(packer, reader, "mlp", keeps_order=False)
    gate_up_bias = reader.bias(*GATE_UP)
    if gate_up_bias is not None and down.order is not None:
        gate_up_bias = gate_up_bias.view(2, -1)[:, down.order.long()].flatten().contiguous()
    return replace(
        layer,
        gate_up=gate_up.weight,
        down=down.weight,
        gate_up_bias=gate_up_bias,
        down_bias=reader.bias(*DOWN),
        orders=layer.orders._replace(gate_up=gate_up.order),
    )


def _read_network(
    packer: _Packer, reader: LayerReader, name: str, *, keeps_order: bool
) -> tuple[PackedMatrix, PackedMatrix]:
    """Gates and what they gate, and what comes down. keeps_order: of the inputs, which all experts share.

    The inputs of `down` are the outputs of the others, which may come in its order.
    """
    gate_up_names, down_names = (
        reader.names(*(part.replace("mlp", name) for part in parts)) for parts in (GATE_UP, DOWN)
    )
    down = packer.read(down_names)
    fed = None if down.order is None else down.order.numpy().astype(np.intp)
    return packer.read(gate_up_names, (fed, fed), keeps_order=keeps_order), down


def _read_experts(mixture: Mixture, packer: _Packer, reader: LayerReader) -> Experts:
    """Raises UnsupportedModelError for experts that are packed in more than one way."""
    tensor, has_bias = packer.checkpoint.tensor, mixture.routing.has_bias
    (share,) = reader.names("mlp.shared_expert_gate")
    gate_up, down = _stacked(mixture.routing.num_experts, packer, reader)
    return Experts(
        routing=mixture.routing,
        router=torch.from_numpy(tensor(*reader.names("mlp.gate"))),
        gate_up=gate_up,
        down=down,
        bias=reader.vector("mlp.gate.e_score_correction_bias") if has_bias else None,
        shared_gate=torch.from_numpy(tensor(share)).flatten() if mixture.has_shared_gate else None,
    )


def _stacked(num_experts: int, packer: _Packer, reader: LayerReader) -> list[PackedWeight]:
    """Expert after expert, into memory for all, because all would not fit twice."""
    stacks = list[PackedWeight]()
    for expert in range(num_experts):
        network = _read_network(packer, reader, f"mlp.experts.{expert}", keeps_order=True)
        weights = [matrix.weight for matrix in network]
        if not expert:
            stacks = [
                replace(
                    weight,
                    data=torch.empty((num_experts * len(weight.data), weight.data.shape[1]), dtype=torch.uint8),
                    num_outputs=num_experts * weight.num_outputs,
                )
                for weight in weights
            ]
        for stack, weight in zip(stacks, weights, strict=True):
            if stack.code != weight.code:
                names = reader.names(f"mlp.experts.{expert}")
                raise UnsupportedModelError(f"{names[0]}: not packed as expert 0 is: take --quantization none")
            stack.data[expert * len(weight.data) : (expert + 1) * len(weight.data)] = weight.data
    return stacks


def _orders_of_heads(config: ModelConfig) -> tuple[IntArray, ...]:
    """Of the rows of queries, keys and values, see `head_order`; none where they have theirs."""
    order, size = head_order(config), config.head_dim
    if order is None:
        return ()
    queries, keys = (
        np.arange(count * size).reshape(-1, size)[:, order].reshape(-1)
        for count in (config.num_heads, config.num_kv_heads)
    )
    return queries, keys, np.arange(config.num_kv_heads * size)


def _qkv_bias(reader: LayerReader) -> torch.Tensor | None:
    bias, orders = reader.bias(*QKV), _orders_of_heads(reader.weights.config)
    if bias is None or not orders:
        return bias
    parts = torch.split(bias, [len(order) for order in orders])
    return torch.cat([part[torch.from_numpy(order)] for part, order in zip(parts, orders, strict=True)])


def _head_norms(reader: LayerReader) -> HeadNormWeights:
    return HeadNormWeights(reader.head_norm("self_attn.q_norm"), reader.head_norm("self_attn.k_norm"))


def _post_norms(reader: LayerReader) -> PostNorms:
    return PostNorms(reader.norm("post_attention_layernorm"), reader.norm("post_feedforward_layernorm"))
