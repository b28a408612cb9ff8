"""A model out of a GGUF file: which of its tensors is which of the model's.

Knows GGUF's tensor names, as docs/gguf.md of the ggml project lists them, and that GGUF interleaves the rows of a
Llama's query and key projections. Refuses to know the file layout, the metadata, the tokenizer, and how the model
computes.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import dequantize
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline_executor.weights.checkpoint import ModelConfig
from paceline_executor.weights.cuts import of_expert
from paceline_executor.weights.gguf.config import (
    FREQUENCY_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    check_gguf_kind,
    drafting_layers,
    read_gguf_config,
)
from paceline_executor.weights.gguf.header import GgufHeader, TensorInfo
from paceline_executor.weights.refusals import damaged, shown, unsupported
from paceline_executor.weights.stored_checkpoint import StoredCheckpoint, as_float32
from paceline_executor.weights.stored_tensor import FileBytes, FloatType, StoredTensor

_FLOATING_POINT = {
    GGMLQuantizationType.F32: FloatType.FLOAT32,
    GGMLQuantizationType.F16: FloatType.FLOAT16,
    GGMLQuantizationType.BF16: FloatType.BFLOAT16,
}

_TOP_LEVEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_BIAS, _BIAS_NAME = "mlp.gate.e_score_correction_bias", "exp_probs_b.bias"
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")  # one tensor has those of all
_GLM_NAMES = {"post_attention_layernorm": "post_attention_norm"}
_POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FACTOR_TENSORS = {FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS}
_MAX_FACTORS = 1 << 16  # half a head's dimensions


def checkpoint_from_gguf(header: GgufHeader) -> StoredCheckpoint:
    """Raises ModelCorruptError or UnsupportedModelError, before memory is taken for any weight."""
    check_gguf_kind(header)
    config = read_gguf_config(header, _frequency_factors(header))
    stored_names = {name: _stored_name(name, config) for name in config.tensor_shapes()}
    _check_tensors(header, config, stored_names)
    return StoredCheckpoint(config, _stored_tensors(header, config, stored_names))


def _stored_tensors(header: GgufHeader, config: ModelConfig, stored_names: dict[str, str]) -> dict[str, StoredTensor]:
    """By Hugging Face name. A Llama's queries and keys are interleaved; of a bias, its numbers are."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if config.architecture == "llama" else {}
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        tensor = _stored_tensor(header.path, header.tensors[stored_names[name]], heads.get(name.split(".")[-2], 0))
        expert = _expert(name)
        whole = tensor if expert is None else of_expert(tensor, expert, slice(0, shape[0]))
        tensors[name] = replace(whole, shape=shape)
    return tensors


def _expert(name: str) -> int | None:
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def _stored_tensor(path: Path, info: TensorInfo, interleaved_heads: int = 0) -> StoredTensor:
    stored = _FLOATING_POINT.get(info.quantization, info.quantization)
    return StoredTensor(info.name, stored, info.shape, FileBytes(path), info.start, interleaved_heads)


def _stored_name(name: str, config: ModelConfig) -> str:
    """GGUF's name for the tensor that Hugging Face calls `name`."""
    found = _EXPERT.search(name)
    if found is not None:
        return f"blk.{name.split('.')[2]}.ffn_{found[2]}_exps.weight"
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_LEVEL_NAMES:
        return f"{_TOP_LEVEL_NAMES[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    if f"{part}.{kind}" == _BIAS:
        return f"blk.{layer}.{_BIAS_NAME}"
    names = _LAYER_NAMES | _POST_NORM_NAMES if config.post_norms else _LAYER_NAMES
    if config.architecture == "glm4moe":
        names = names | _GLM_NAMES
    return f"blk.{layer}.{names[part]}.{kind}"


def _frequency_factors(header: GgufHeader) -> dict[str, tuple[float, ...]]:
    """They divide rotary frequencies: Llama 3.1 and later have one, longrope models two."""
    factors = {}
    for name in _FACTOR_TENSORS & header.tensors.keys():
        info = header.tensors[name]
        if len(info.shape) != 1 or info.shape[0] > _MAX_FACTORS or info.quantization != GGMLQuantizationType.F32:
            raise damaged(header.path, f"tensor {name} is not a list of float32 numbers")
        factors[name] = tuple(as_float32(_stored_tensor(header.path, info)).tolist())
    return factors


def _check_tensors(header: GgufHeader, config: ModelConfig, stored_names: dict[str, str]) -> None:
    for name, shape in config.tensor_shapes().items():
        info = header.tensors.get(stored_names[name])
        if info is None:
            raise damaged(header.path, f"tensor {stored_names[name]} is missing")
        needed = shape
        if config.experts is not None and _expert(name) is not None:
            needed = (config.experts.routing.num_experts, *shape)
        if info.shape not in (needed, *([shape[1:]] if shape[0] == 1 else [])):  # the converter drops a first 1
            raise damaged(header.path, f"tensor {info.name} has shape {info.shape} where {needed} is needed")
    surplus = header.tensors.keys() - stored_names.values() - _FACTOR_TENSORS
    drafting = tuple(f"blk.{layer}." for layer in drafting_layers(header))
    surplus = {name for name in surplus if not name.startswith(drafting)}
    if surplus:
        sentence = f"it has a tensor {shown(min(surplus))} that a {config.architecture} model does not use"
        raise unsupported(header.path, sentence)
    for quantization in {info.quantization for info in header.tensors.values()}:
        _check_quantization(header.path, quantization)
    for info in header.tensors.values():
        if len(info.shape) == 1 and info.quantization not in _FLOATING_POINT:
            raise unsupported(header.path, f"tensor {info.name} is one row of {info.quantization.name} numbers")


def _check_quantization(path: Path, quantization: GGMLQuantizationType) -> None:
    """The library keeps its list of types to itself: dequantise one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[quantization][1]), np.uint8), quantization)
    except NotImplementedError as error:
        raise unsupported(path, f"the gguf library cannot dequantise its {quantization.name} tensors") from error
