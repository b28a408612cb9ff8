"""Folders of EAGLE-3 heads: what each dialect says, and what is refused, before a weight is read."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from paceline_executor.errors import ModelCorruptError, ModelNotFoundError, UnsupportedModelError
from paceline_executor.weights.checkpoint import Llama3Scaling
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder
from random_models import TINY_CONFIG
from random_models.eagle3 import Dialect, random_head

TARGET = replace(TINY_CONFIG, num_layers=8, vocab_size=60)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
DIALECTS = pytest.mark.parametrize("dialect", Dialect)


def read(tmp_path, parts, dialect=Dialect.AUTHORS, target=TARGET):
    """A head of these parts, as it is read for the target."""
    return eagle3_from_folder(parts.write(tmp_path / "head", dialect), target)


@DIALECTS
def test_the_shape_of_a_head_is_what_its_config_says(tmp_path, dialect):
    parts = random_head(TARGET, aux_layers=(3, 2, 7), draft_vocab_size=20)
    config = read(tmp_path, parts, dialect).config
    assert (config.layer.hidden_size, config.layer.num_heads, config.layer.head_dim) == (64, 4, 16)
    assert (config.draft_vocab_size, config.target_hidden_size, config.aux_layers) == (20, 64, (3, 2, 7))
    assert config.norm_before_residual is False

    parts.fields["norm_before_residual"] = True
    assert read(tmp_path, parts, dialect).config.norm_before_residual is True


def test_the_rotation_of_speculators_is_scaled_as_it_says(tmp_path):
    folder = random_head(TARGET).write(tmp_path / "head", Dialect.SPECULATORS)
    fields = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields["transformer_layer_config"]["rope_scaling"] = scaling | {"original_max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(fields))
    assert eagle3_from_folder(folder, TARGET).config.layer.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    ("dialect", "fields", "layers"),
    [
        (Dialect.AUTHORS, {}, (2, 4, 5)),
        (Dialect.SPECULATORS, {}, (2, 4, 5)),
        (Dialect.AUTHORS, {LAYER_IDS: [2, 3, 6]}, (2, 3, 6)),
        (Dialect.AUTHORS, {"eagle_config": {LAYER_IDS: [2, 3, 6]}}, (2, 3, 6)),
        (Dialect.AUTHORS, {"eagle_config": {LAYER_IDS: [1, 3, 6]}}, (2, 4, 7)),  # those that states come out of
        (Dialect.SPECULATORS, {LAYER_IDS: [1, 3, 6]}, (1, 3, 6)),
    ],
)
def test_layers_are_those_that_states_flow_into(tmp_path, dialect, fields, layers):
    """By default the third, the middle one and the third from the end; some files count them otherwise."""
    parts = random_head(TARGET, aux_layers=layers)
    del parts.fields[LAYER_IDS]
    parts.fields |= fields
    assert read(tmp_path, parts, dialect).config.aux_layers == layers


@DIALECTS
@given(data=st.data())
def test_the_id_map_is_undone_whatever_it_leads_to(tmp_path_factory, dialect, data):
    target_ids = np.array(data.draw(st.lists(st.integers(0, 59), min_size=1, max_size=59, unique=True)))
    parts = random_head(TARGET, draft_vocab_size=target_ids.size)
    parts.tensors["d2t"] = target_ids - np.arange(target_ids.size)
    parts.tensors["t2d"] = np.isin(np.arange(60), target_ids)
    checkpoint = read(tmp_path_factory.mktemp("ids"), parts, dialect)
    assert checkpoint.target_ids.tolist() == target_ids.tolist()
    num_floats = sum(tensor.size for tensor in parts.tensors.values() if tensor.dtype == np.float32)
    assert checkpoint.num_parameters() == num_floats


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"d2t": None}, "tensor d2t is missing, the map of 20 ids to 60"),
        ({"d2t": np.zeros(19, np.int64)}, r"tensor d2t has shape \(19,\) where \(20,\) is needed"),
        ({"t2d": np.zeros(20, np.bool_)}, r"tensor t2d has shape \(20,\) where \(60,\) is needed"),
        ({"d2t": np.full(20, 41), "t2d": None}, "leads out of a vocabulary of 60 tokens"),
        ({"d2t": np.full(20, -1)}, "leads out of a vocabulary"),
        ({"d2t": -np.arange(20)}, "leads to a token twice"),
        ({"d2t": np.zeros(20, np.int64), "t2d": np.arange(60) < 21}, "d2t and t2d contradict each other"),
        ({"fc.weight": None}, "tensor fc.weight is missing"),
        ({"midlayer.hidden_norm.weight": np.ones(63, np.float32)}, r"has shape \(63,\) where \(64,\) is needed"),
        ({"lm_head.weight": np.ones((60, 64), np.float32)}, r"where \(20, 64\) is needed"),
        ({"embed_tokens.weight": np.ones((20, 64), np.float32)}, r"where \(60, 64\) is needed"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(tmp_path, changes, sentence):
    parts = random_head(TARGET, draft_vocab_size=20)
    for name, tensor in changes.items():
        parts.tensors.pop(name, None)
        parts.tensors |= {} if tensor is None else {name: tensor}
    with pytest.raises(ModelCorruptError, match=sentence):
        read(tmp_path, parts)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "no EAGLE-3 head"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3', not 'llama'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; a head has one layer"),
        ({"attention_bias": True}, "its matrices have biases"),
        ({"norm_before_fc": True}, "it sets norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state to false"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type is 'eagle', not 'eagle3'"),
        ({"vocab_size": 61}, "vocab_size is 61, and that of the model is 60; choose one trained for this model"),
        ({"target_hidden_size": 65}, "target_hidden_size is 65, and that of the model is 64"),
        ({LAYER_IDS: [2, 8]}, "it reads layers 2, 8 of 8"),
        ({LAYER_IDS: [2, 2]}, "it reads layers 2, 2 of 8"),
    ],
)
def test_heads_that_are_not_for_this_model_or_version_are_refused(tmp_path, changes, sentence):
    parts = random_head(TARGET)
    parts.fields |= changes
    with pytest.raises(UnsupportedModelError, match=sentence):
        read(tmp_path, parts)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({LAYER_IDS: []}, f"{LAYER_IDS} is not a list of integers"),
        ({LAYER_IDS: ["2"]}, f"{LAYER_IDS} is not a list of integers"),
        ({"draft_vocab_size": 61}, "draft_vocab_size is 61, outside 1 to 60"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config is missing"),
    ],
)
def test_fields_that_make_no_sense_are_named(tmp_path, changes, sentence):
    parts = random_head(TARGET)
    parts.fields |= changes
    with pytest.raises(ModelCorruptError, match=sentence):
        read(tmp_path, parts)


def test_a_model_of_few_layers_needs_its_layers_named(tmp_path):
    parts = random_head(TARGET, aux_layers=(2, 3, 4))
    del parts.fields[LAYER_IDS]
    with pytest.raises(UnsupportedModelError, match="it reads layers 2, 3, 3 by default of 6"):
        read(tmp_path, parts, target=replace(TARGET, num_layers=6))


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        ({"midlayer.self_attn.q_norm.weight": np.ones(16, np.float32)}, "q_norm.weight' that an EAGLE-3 head does not"),
        ({"t2t": np.zeros(3, np.int64)}, "tensor 't2t' that an EAGLE-3 head does not use"),
    ],
)
def test_a_head_with_more_than_we_compute_is_refused(tmp_path, tensor, sentence):
    """It would draft badly."""
    parts = random_head(TARGET)
    parts.tensors |= tensor
    with pytest.raises(UnsupportedModelError, match=sentence):
        read(tmp_path, parts)


def test_a_name_twice_and_weights_in_pickles_are_refused(tmp_path):
    parts = random_head(TARGET)
    parts.tensors["layers.0.hidden_norm.weight"] = parts.tensors["midlayer.hidden_norm.weight"]
    with pytest.raises(ModelCorruptError, match="appears twice"):
        read(tmp_path, parts)
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model.bin is not read.* convert the head to safetensors"):
        eagle3_from_folder(tmp_path / "head", TARGET)
    with pytest.raises(ModelNotFoundError):
        eagle3_from_folder(tmp_path / "nowhere", TARGET)


def test_a_model_with_integers_among_its_weights_is_refused_as_before(tmp_path):
    from paceline_executor.weights import load_checkpoint

    folder = random_head(TARGET).write(tmp_path / "head")
    fields = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({"x": np.zeros(3, np.int64)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="tensor 'x' is of type 'int64'; F32, F16, BF16, F8_E4M3 are read"):
        load_checkpoint(folder)
