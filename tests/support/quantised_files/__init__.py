"""Small models in every quantised format, as folders, with the float32 weights that each stands for.

`writers` writes matrices; here are the configurations of the tools and which matrix has which format.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from paceline_executor.weights import ModelConfig
from quantised_files.writers import (
    Float32Array,
    Tensors,
    Writer,
    awq,
    bitsandbytes,
    compressed,
    float8,
    fp4,
    gptq,
    int8,
    left_beside,
    plain,
)
from random_models import TINY_CONFIG, llama_fields

# Neither 64 nor 128 divides the inputs of any matrix: last groups and blocks are cut off.
CONFIG = replace(
    TINY_CONFIG,
    hidden_size=96,
    intermediate_size=160,
    num_heads=3,
    num_kv_heads=1,
    head_dim=32,
    vocab_size=64,
    tie_word_embeddings=False,
)
_Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """How a tool writes a model."""

    config: _Fields | None
    writer: Writer
    others: Mapping[str, Writer] = field(default_factory=dict)  # by what a module's name contains
    file: str = "config.json"  # where the tool keeps its configuration


@dataclass(slots=True)
class Written:
    """A test changes the first two at will, then saves them."""

    fields: dict[str, _Fields]  # by file
    tensors: Tensors
    weights: dict[str, Float32Array]

    def save(self, folder: Path) -> Path:
        for name, fields in self.fields.items():
            (folder / name).write_text(json.dumps(fields))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


def written(variant: Variant, config: ModelConfig = CONFIG, of_config: _Fields | None = None) -> Written:
    """config: what of_config says in a config.json, that of a Llama where it is None."""
    tensors: Tensors = {}
    weights: dict[str, Float32Array] = {}
    for name, shape in config.tensor_shapes().items():
        rng, module = np.random.default_rng(list(name.encode())), name.removesuffix(".weight")
        if len(shape) == 1:
            tensors[name] = torch.from_numpy(rng.uniform(0.8, 1.2, shape)).bfloat16()
            weights[name] = tensors[name].float().numpy()
            continue
        is_linear = name.endswith("_proj.weight")
        writer = next(
            (other for part, other in variant.others.items() if part in module), variant.writer if is_linear else plain
        )
        parts, weights[name] = writer(rng, *shape)
        tensors |= {f"{module}.{end}": tensor.contiguous() for end, tensor in parts.items()}
    fields = {"config.json": dict(of_config or llama_fields(config))}
    if variant.config is not None and variant.file == "config.json":
        fields["config.json"]["quantization_config"] = deepcopy(variant.config)
    elif variant.config is not None:
        fields[variant.file] = deepcopy(variant.config)
    return Written(fields, tensors, weights)


def _gptq(**changes: object) -> _Fields:
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    return fields | {"checkpoint_format": "gptq"} | changes


def _awq(**changes: object) -> _Fields:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"} | changes


def _scheme(bits: int = 4, group: int | None = 32, target: str = "Linear", **changes: object) -> _Fields:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "actorder": None, "block_structure": None}
    weights |= {"strategy": "group" if group else "channel", "group_size": group} | changes
    return {"targets": [target], "weights": weights}


def _w8a8(**changes: object) -> _Fields:
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return _scheme(8, None, **changes) | {"input_activations": activations}


def _compressed(form: str, *schemes: _Fields) -> _Fields:
    groups = {f"group_{index}": scheme for index, scheme in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": groups}


def _modelopt(algorithm: str | None, **changes: object) -> _Fields:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]} | changes


_FP8: _Fields = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_BNB: _Fields = {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": None}
_PACK, _DENSE8 = "pack-quantized", "float-quantized"
_FLOAT8 = _scheme(8, None, type="float")
_BLOCKS = _scheme(8, None, type="float", strategy="block", block_structure=[64, 64])
_DYNAMIC = {r"+:.*\.down_proj": {"bits": 8, "group_size": 64}, r"-:.*layers\.1\.self_attn": {}, "lm_head": {"bits": 8}}
_DYNAMIC_WRITERS = {"layers.1.self_attn": plain, "down_proj": gptq(8, 64), "lm_head": gptq(8)}

VARIANTS: Mapping[str, Variant] = {
    "gptq": Variant(_gptq(), gptq()),
    "gptq g64, last group cut off": Variant(_gptq(group_size=64), gptq(group=64)),
    "gptq g128": Variant(_gptq(group_size=128), gptq(group=128)),
    "gptq whole rows": Variant(_gptq(group_size=-1), gptq(group=-1)),
    "gptq asym": Variant(_gptq(sym=False), gptq(is_symmetric=False)),
    "gptq asym v2": Variant(_gptq(sym=False, checkpoint_format="gptq_v2"), gptq(version=2, is_symmetric=False)),
    "gptq v2 under the key of v1": Variant(_gptq(sym=False), gptq(version=2, is_symmetric=False)),
    "gptq v1 under the key of v2": Variant(
        _gptq(sym=False, format="gptq_v2", checkpoint_format=None), gptq(is_symmetric=False)
    ),
    "gptq asym, of another mean": Variant(_gptq(sym=False), gptq(is_symmetric=False, shift=1)),
    "gptq act order": Variant(_gptq(desc_act=True), gptq(act_order=True)),
    "gptq asym act order g64": Variant(
        _gptq(desc_act=True, sym=False, group_size=64), gptq(group=64, act_order=True, is_symmetric=False)
    ),
    "gptq 8 bits": Variant(_gptq(bits=8), gptq(8)),
    "gptq 8 bits asym v2": Variant(
        _gptq(bits=8, sym=False, checkpoint_format="gptq_v2"), gptq(8, version=2, is_symmetric=False)
    ),
    "gptq dynamic, output quantised": Variant(_gptq(lm_head=True, dynamic=_DYNAMIC), gptq(), _DYNAMIC_WRITERS),
    "gptq without g_idx": Variant(_gptq(), gptq(g_idx="absent")),
    "gptq with a g_idx of zeros": Variant(_gptq(), gptq(g_idx="zeros")),
    "gptq with dummy zeros": Variant(_gptq(), gptq(dummy_zeros=True)),
    "gptq of 2023": Variant(
        {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}, gptq(), file="quantize_config.json"
    ),
    "gptq by auto-round": Variant(
        _gptq(quant_method="auto-round", packing_format="auto_round:auto_gptq", checkpoint_format=None), gptq()
    ),
    "awq": Variant(_awq(quant_method="AWQ"), awq()),
    "awq bfloat16 scales": Variant(_awq(), awq(dtype=torch.bfloat16)),
    "awq whole rows": Variant(_awq(group_size=-1), awq(-1)),
    "awq gemv": Variant(_awq(version="gemv"), awq(is_gemv=True)),
    "awq of 2023, in capitals": Variant(
        {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}, awq(), file="quant_config.json"
    ),
    "awq, half of it in floats": Variant(
        _awq(modules_to_not_convert=["k_proj", "mlp"]), awq(), {"k_proj": plain, "mlp": plain}
    ),
    "w4a16": Variant(_compressed(_PACK, _scheme()), compressed()),
    "w4a16 asym": Variant(_compressed(_PACK, _scheme(symmetric=False)), compressed(is_symmetric=False)),
    "w4a16 act order": Variant(_compressed(_PACK, _scheme(actorder="group")), compressed(act_order=True)),
    "w4a16 asym act order": Variant(
        _compressed(_PACK, _scheme(actorder="group", symmetric=False)), compressed(act_order=True, is_symmetric=False)
    ),
    "w4a16 channel": Variant(
        _compressed(_PACK, _scheme(group=None)) | {"quant_method": "compressed_tensors"}, compressed(group=-1)
    ),
    "w4a16 with a g_idx of nothing": Variant(_compressed(_PACK, _scheme(actorder="weight")), compressed(g_idx="unset")),
    "w4a16, zeros in some": Variant(
        _compressed(_PACK, _scheme(), _scheme(symmetric=False)), compressed(), {"mlp": compressed(is_symmetric=False)}
    ),
    "w8a16 channel": Variant(_compressed(_PACK, _scheme(8, None)), compressed(8, -1)),
    "w8a8": Variant(_compressed("int-quantized", _w8a8()), compressed(8, -1, form="int8")),
    "w8a8 asym": Variant(
        _compressed("int-quantized", _w8a8(symmetric=False)),
        compressed(8, -1, form="int8", is_symmetric=False),
    ),
    "w4a8, a byte each": Variant(_compressed("int-quantized", _scheme()), compressed(form="int8")),
    "ct float8 rows": Variant(_compressed(_DENSE8, _FLOAT8), float8("rows", dtype=torch.bfloat16)),
    "ct float8 static": Variant(_compressed(_DENSE8, _FLOAT8), float8("one", dtype=torch.bfloat16)),
    "ct float8 blocks": Variant(_compressed(_DENSE8, _BLOCKS), float8("blocks", (64, 64), dtype=torch.bfloat16)),
    "ct mixed": Variant(
        _compressed("mixed-precision", _scheme(symmetric=False, target="re:.*mlp.*"), _FLOAT8),
        compressed(is_symmetric=False),
        {"layers.1.mlp.down_proj": plain, "k_proj": compressed(is_symmetric=False), "self_attn": float8("rows")},
    ),
    "mxfp4": Variant(_compressed("mxfp4-pack-quantized", _scheme(type="float")), fp4("mx")),
    "nvfp4": Variant(
        _compressed("nvfp4-pack-quantized", _scheme(group=16, type="float", strategy="tensor_group")), fp4("nv")
    ),
    "fp8 blocks": Variant(_FP8 | {"weight_block_size": [128, 128]}, float8("blocks", name="weight_scale_inv")),
    "fp8 blocks, bfloat16 scales, some left as they were": Variant(
        _FP8 | {"weight_block_size": [64, 32]},
        float8("blocks", (64, 32), "weight_scale_inv", torch.bfloat16),
        {"v_proj": left_beside("weight_scale_inv")},
    ),
    "fp8 blocks, scales by their exponents": Variant(
        _FP8 | {"weight_block_size": [64, 64], "scale_fmt": "ue8m0"},
        float8("blocks", (64, 64), "weight_scale_inv", torch.uint8),
    ),
    "fp8 of one scale": Variant(_FP8, float8("all", name="weight_scale_inv")),
    "fbgemm_fp8": Variant({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, float8("rows")),
    "modelopt": Variant(_modelopt("fp8"), float8("all")),
    "modelopt, keys and values only": Variant(_modelopt(None, kv_cache_scheme="FP8"), plain),
    "modelopt nvfp4": Variant(_modelopt("NVFP4", group_size=16), fp4("modelopt")),
    "modelopt mixed": Variant(
        _modelopt("MIXED_PRECISION", quantized_layers={"model.layers.0.mlp.down_proj": {"quant_algo": "W4A16_NVFP4"}}),
        float8("rows"),
        {"mlp": fp4("modelopt"), "lm_head": fp4("modelopt"), "q_proj": float8("all"), "k_proj": plain},
    ),
    "modelopt of 2024": Variant(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        float8("all"),
        file="hf_quant_config.json",
    ),
    "nf4": Variant(_BNB, bitsandbytes()),
    "nf4 nested": Variant(_BNB, bitsandbytes(is_nested=True)),
    "nf4 in bfloat16": Variant(_BNB, bitsandbytes(storage=torch.bfloat16)),
    "fp4 nested": Variant(_BNB, bitsandbytes("fp4", is_nested=True)),
    "LLM.int8": Variant(_BNB | {"load_in_8bit": True}, int8),
}
"""By the format, and what is particular about it."""
