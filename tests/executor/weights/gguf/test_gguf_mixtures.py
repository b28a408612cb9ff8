"""The same mixture of experts is the same, whether it is read from a Hugging Face folder or from a GGUF file."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf.constants import MODEL_ARCH, GGMLQuantizationType

from paceline_executor.errors import ModelCorruptError, UnsupportedModelError
from paceline_executor.weights import load_checkpoint
from random_models import GgufParts
from tiny_mixtures import CONFIGS, random_mixture

F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
LAYERS, HEADS, KV_HEADS = 3, 4, 2
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "glm4_moe": "glm4moe",
}
TABLES = {"glm4moe": MODEL_ARCH.GLM4_MOE}  # in the library's own spelling


def parts_of(name, model=None):
    """The model as llama.cpp's converter writes it; tensors are named by the gguf library's own table."""
    architecture = ARCHITECTURES[name.partition(",")[0]]
    arch = TABLES.get(architecture) or MODEL_ARCH[architecture.upper()]
    parts, names = GgufParts(metadata_of(name, architecture)), gguf.get_tensor_name_map(arch, LAYERS)
    for theirs, tensor in (model or random_mixture(name)).state_dict().items():
        for part, values in unstacked(theirs, tensor.numpy()):
            if architecture == "llama" and ("q_proj" in part or "k_proj" in part):
                heads = HEADS if "q_proj" in part else KV_HEADS
                values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
            parts.tensors[stored] = (np.ascontiguousarray(values.squeeze()), F32)
    if architecture == "glm4moe":
        parts.tensors["blk.3.nextn.enorm.weight"] = (np.ones(64, np.float32), F32)
    return parts


def unstacked(name, values):
    """Gates apart from what they gate, and names as the converter sees them."""
    if name.endswith("gate_up_proj"):
        gates, ups = np.split(values, 2, axis=1)
        return [
            (name.replace("gate_up_proj", f"{part}_proj.weight"), half) for part, half in (("gate", gates), ("up", ups))
        ]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", values)]
    return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), values)]


def metadata_of(name, architecture):
    """The keys that the converter writes."""
    config = CONFIGS[name]
    head_dim = getattr(config, "head_dim", None) or 16
    values = {
        "block_count": LAYERS,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "expert_count": getattr(config, "num_local_experts", None) or config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }
    if hasattr(config, "moe_intermediate_size"):
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    if hasattr(config, "norm_topk_prob"):
        values["expert_weights_norm"] = config.norm_topk_prob
    if architecture == "llama":
        values["attention.sliding_window"] = config.sliding_window
    if architecture == "qwen2moe":
        values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if architecture == "glm4moe":
        values |= {
            "block_count": LAYERS + 1,
            "nextn_predict_layers": 1,
            "rope.dimension_count": head_dim // 2,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_gating_func": 2,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in values.items()}


def read(tmp_path, parts):
    """The checkpoint that these parts make."""
    return load_checkpoint(parts.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_holds_the_mixture_that_its_folder_holds(tmp_path, name):
    model = random_mixture(name)
    model.save_pretrained(tmp_path)
    folder, file = load_checkpoint(tmp_path), read(tmp_path, parts_of(name, model))
    assert file.config == replace(folder.config, architecture=ARCHITECTURES[name])
    for tensor in folder.config.tensor_shapes():
        assert np.array_equal(file.tensor(tensor), folder.tensor(tensor)), tensor


def test_quantised_experts_are_read_one_by_one(tmp_path):
    parts = parts_of("mixtral")
    stacked = parts.tensors["blk.1.ffn_up_exps.weight"][0]
    data = gguf.quantize(stacked, Q8_0)
    parts.tensors["blk.1.ffn_up_exps.weight"] = (data, Q8_0)
    expert = read(tmp_path, parts).tensor("model.layers.1.mlp.experts.5.up_proj.weight")
    assert np.array_equal(expert, gguf.dequantize(data, Q8_0)[5])


def test_what_a_file_leaves_out_is_what_llama_cpp_takes(tmp_path):
    """A Mixtral's weights sum to 1, those of Qwen 3, too; those of Qwen 2 and OLMoE do not."""
    for name, expected in (("mixtral", True), ("qwen3_moe", True), ("qwen2_moe", False), ("olmoe", False)):
        parts = parts_of(name)
        parts.metadata.pop(f"{ARCHITECTURES[name]}.expert_weights_norm", None)
        assert read(tmp_path, parts).config.experts.routing.renormalises is expected


WRONG = {
    "expert_count": (1, "expert_count is 1, outside 2 to 21845"),
    "expert_used_count": (9, "expert_used_count is 9, outside 1 to 8"),
    "expert_group_count": (3, "2 of 3 groups of 8 experts do not have 2 of equal size"),
    "expert_group_used_count": (5, "expert_group_used_count is 5, outside 0 to 4"),
    "expert_weights_scale": (-1.0, "expert_weights_scale is -1.0"),
    "leading_dense_block_count": (2, "leading_dense_block_count is 2, and its tensors say otherwise"),
    "nextn_predict_layers": (4, "nextn_predict_layers is 4, and there are 4 layers in all"),
    "rope.dimension_count": (7, "rope.dimension_count is 7, which is odd"),
}
UNSUPPORTED = {
    "expert_gating_func": (1, "expert_gating_func to '1', which is not computed"),
    "swiglu_clamp_exp": ([7.0, 7.0], r"swiglu_clamp_exp to '\[7.0, 7.0\]', which is not computed"),
    "experts_per_group": (2, "experts_per_group to '2', which is not computed"),
    "rope.scaling.factor": (4.0, "scales rotations of a part of each head"),
}


@pytest.mark.parametrize("key", [*WRONG, *UNSUPPORTED])
def test_what_cannot_be_computed_is_named(tmp_path, key):
    value, message = (WRONG | UNSUPPORTED)[key]
    parts = parts_of("glm4_moe")
    parts.metadata[f"glm4moe.{key}"] = value
    with pytest.raises(ModelCorruptError if key in WRONG else UnsupportedModelError, match=message):
        read(tmp_path, parts)


@pytest.mark.parametrize(
    ("stored", "shape", "message"),
    [
        ("ffn_down_exps", (7, 64, 96), r"ffn_down_exps.weight has shape \(7, 64, 96\) where \(8, 64, 96\) is needed"),
        ("ffn_gate_inp", (7, 64), r"has shape \(7, 64\) where \(8, 64\) is needed"),
        ("ffn_gate_exps", None, "blk.0.ffn_gate_exps.weight is missing"),
        ("ffn_up_shexp", (96, 64), "has a tensor 'blk.0.ffn_up_shexp.weight' that a llama model does not use"),
    ],
)
def test_experts_that_do_not_fit_are_named(tmp_path, stored, shape, message):
    parts = parts_of("mixtral")
    parts.tensors.pop(f"blk.0.{stored}.weight", None)
    if shape is not None:
        parts.tensors[f"blk.0.{stored}.weight"] = (np.zeros(shape, np.float32), F32)
    with pytest.raises((ModelCorruptError, UnsupportedModelError), match=message):
        read(tmp_path, parts)
