"""Folders with mixtures of experts: every spelling is one model, and what is not computed is refused by name."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline_executor.errors import ModelCorruptError, UnsupportedModelError
from paceline_executor.weights import load_checkpoint, load_dummy
from paceline_executor.weights.hf.config import read_hf_config
from paceline_kernels.routing import Routing, Score
from tiny_mixtures import random_mixture

EXPERT = "model.layers.1.mlp.experts.5"


def written(folder, name, **options):
    random_mixture(name).save_pretrained(folder, **options)
    return folder


def rewritten(folder, change, **fields):
    """Give the tensors and fields of a folder other values."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "glm4_moe"])
def test_experts_apart_and_experts_in_one_tensor_are_the_same_model(tmp_path, name):
    """Bit for bit, names and digest included."""
    apart = load_checkpoint(written(tmp_path / "apart", name))
    stacked = load_checkpoint(written(tmp_path / "stacked", name, save_original_format=False))
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "stacked" / "model.safetensors")
    assert apart.config == stacked.config
    for tensor in apart.config.tensor_shapes():
        assert np.array_equal(apart.tensor(tensor), stacked.tensor(tensor)), tensor
    assert apart.digest == stacked.digest


def test_layers_that_draft_are_not_read(tmp_path):
    """GLM's files have one behind the last."""

    def add(tensors):
        tensors["model.layers.3.eh_proj.weight"] = np.ones((64, 128), np.float32)

    folder = rewritten(written(tmp_path, "glm4_moe"), add)
    assert load_checkpoint(folder).config.num_layers == 3
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.3\.eh_proj\.weight' that a glm4moe model"):
        load_checkpoint(rewritten(folder, add, num_nextn_predict_layers=0))


@pytest.mark.parametrize(
    ("kind", "expected", "num_dense"),
    [
        ("mixtral", Routing(8, 2), 0),
        ("qwen2_moe", Routing(60, 4, renormalises=False), 0),
        ("qwen3_moe", Routing(128, 8, renormalises=False), 0),
        ("olmoe", Routing(64, 8, renormalises=False), 0),
        ("glm4_moe", Routing(128, 8, Score.SIGMOID, has_bias=True), 1),
    ],
)
def test_fields_that_are_absent_are_what_transformers_takes(tmp_path, kind, expected, num_dense):
    experts = read_fields(tmp_path, {"model_type": kind}).experts
    assert experts.routing == expected
    assert experts.sparse_layers == (False,) * num_dense + (True,) * (3 - num_dense)


def read_fields(folder, fields):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 16}
    (folder / "config.json").write_text(json.dumps({"vocab_size": 96} | sizes | fields))
    return read_hf_config(folder / "config.json")


WRONG = {
    "qwen3_moe": [
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, outside 1 to 128"),
        ({"num_experts": 4}, "num_experts_per_tok is 8, outside 1 to 4"),
        ({"num_experts": 4096, "num_hidden_layers": 4096}, "num_experts is 4096, outside 1 to 16"),
        ({"num_experts": 1}, "num_experts is 1, and a mixture has several experts"),
        ({"num_experts": 16, "num_local_experts": 32}, "num_local_experts is 32, and num_experts is 16"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is not true or false"),
        ({"mlp_only_layers": ["first"]}, "mlp_only_layers is not a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ],
    "qwen2_moe": [({"use_sliding_window": True}, "layer_types is not a list of 3 names")],
    "glm4_moe": [
        ({"n_group": 3}, "n_group is 3, and groups of 128 experts are of one size"),
        ({"n_group": 128}, "n_group is 128"),
        ({"n_group": 4, "topk_group": 5}, "topk_group is 5, outside 1 to 4"),
        ({"n_group": 32, "topk_group": 1}, "topk_group is 1: so many groups of 4 have no 8 experts"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor is 0.3, of heads of 4 dimensions no even number"),
    ],
}
UNSUPPORTED = {
    "deepseek_v3": [({}, "model_type is 'deepseek_v3' with multi-head latent attention, which is not computed")],
    "gpt_oss": [({}, "model_type is 'gpt_oss' with attention sinks")],
    "olmoe": [({"clip_qkv": 8.0}, "sets clip_qkv to '8.0', which is not computed")],
    "qwen3_moe": [
        ({"swiglu_limit": 7.0}, "sets swiglu_limit to '7.0'"),
        ({"scoring_func": "sigmoid"}, "sets scoring_func to 'sigmoid'"),
        ({"routed_scaling_factor": 2.0}, "sets routed_scaling_factor to '2.0'"),
    ],
    "glm4_moe": [
        ({"topk_method": "greedy"}, "sets topk_method to 'greedy'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "scales rotations of a part of each head"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "error", "fields", "message"),
    [
        *((kind, ModelCorruptError, *case) for kind, cases in WRONG.items() for case in cases),
        *((kind, UnsupportedModelError, *case) for kind, cases in UNSUPPORTED.items() for case in cases),
    ],
)
def test_what_cannot_be_computed_is_named(tmp_path, kind, error, fields, message):
    with pytest.raises(error, match=message):
        read_fields(tmp_path, {"model_type": kind} | fields)


def test_what_a_file_says_of_training_is_not_asked(tmp_path):
    of_training = {"router_aux_loss_coef": 0.1, "output_router_logits": True, "router_jitter_noise": 0.1}
    fields = of_training | {"model_type": "mixtral", "norm_topk_prob": False, "scoring_func": "softmax"}
    assert read_fields(tmp_path, fields).experts.routing == Routing(8, 2)


DAMAGES = {
    "missing": (lambda tensors: tensors.pop(f"{EXPERT}.up_proj.weight"), r"5\.up_proj\.weight is missing"),
    "of another shape": (
        lambda tensors: tensors.update({f"{EXPERT}.up_proj.weight": np.ones((64, 47), np.float32)}),
        r"5\.up_proj\.weight has shape \(64, 47\) where \(48, 64\) is needed",
    ),
    "of another type": (
        lambda tensors: tensors.update({f"{EXPERT}.up_proj.weight": np.ones((48, 64), np.float16)}),
        r"5\.up_proj\.weight is not stored as that of expert 0 is",
    ),
    "one too many": (
        lambda tensors: tensors.update({"model.layers.1.mlp.experts.8.up_proj.weight": np.ones((48, 64), np.float32)}),
        r"'model\.layers\.1\.mlp\.experts\.8\.up_proj\.weight' that a qwen3moe model does not use",
    ),
    "one stack too small": (
        lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": np.ones((7, 64, 48), np.float32)}),
        r"has shape \(7, 64, 48\) where \(8, 64, 48\) is needed",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_expert_that_does_not_fit_is_named(tmp_path, damage):
    change, message = DAMAGES[damage]
    folder = rewritten(written(tmp_path, "qwen3_moe"), change)
    with pytest.raises((ModelCorruptError, UnsupportedModelError), match=message):
        load_checkpoint(folder)


def test_random_weights_have_the_shapes_of_experts(tmp_path):
    read_fields(tmp_path, {"model_type": "glm4_moe", "n_routed_experts": 8, "moe_intermediate_size": 48})
    checkpoint, _ = load_dummy(tmp_path)
    assert checkpoint.tensor("model.layers.2.mlp.experts.7.down_proj.weight").shape == (64, 48)
    assert not checkpoint.tensor("model.layers.2.mlp.gate.e_score_correction_bias").any()
