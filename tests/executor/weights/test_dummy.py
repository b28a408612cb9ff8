"""Weights that are invented: of the shape that a config.json says, served like others, and told to be so."""

import json
from dataclasses import replace

import numpy as np
import pytest

from paceline_executor.config import parse_config
from paceline_executor.errors import ModelNotFoundError, UnsupportedModelError
from paceline_executor.models.packed_llama import PackedLlamaModel
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.start.loading import load
from paceline_executor.weights import load_dummy
from paceline_executor.weights.stored_tensor import FloatType, GroupedType
from random_models import TINY_CONFIG, llama_fields

CONFIG = replace(TINY_CONFIG, head_dim=32, vocab_size=300, max_model_len=512)
SHAPE = llama_fields(CONFIG) | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}


@pytest.fixture
def folder(tmp_path):
    """A config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def test_weights_have_the_shapes_of_the_configuration(folder):
    checkpoint, tokenizer = load_dummy(folder)
    assert tokenizer is None
    for name, shape in checkpoint.config.tensor_shapes().items():
        values = checkpoint.tensor(name)
        assert (values.shape, values.dtype) == (shape, np.float32)
        assert np.array_equal(values, load_dummy(folder)[0].tensor(name))
        assert np.array_equal(values.tobytes(), checkpoint.stored(name).read().tobytes())
        assert checkpoint.quantized(name) is None
    first, second = (checkpoint.tensor(f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(2))
    assert not np.array_equal(first, second)
    with pytest.raises(KeyError):
        checkpoint.quantized("lm_head.bias")


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False, "desc_act": True}


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (AWQ, GroupedType("awq-int4", 4, group=32, scales=FloatType.BFLOAT16, has_zeros=True)),
        (GPTQ, GroupedType("gptq-int8", 8, scales=FloatType.BFLOAT16, has_zeros=True, is_ordered=True)),
    ],
    ids=["awq", "gptq"],
)
def test_matrices_are_quantised_as_the_configuration_says(folder, method, kind):
    (folder / "config.json").write_text(json.dumps(SHAPE | {"quantization_config": method}))
    checkpoint, _ = load_dummy(folder)
    assert checkpoint.quantization == kind.name
    for name, (outputs, *rest) in checkpoint.config.tensor_shapes().items():
        rows = checkpoint.quantized(name)
        assert (rows is not None) == name.endswith("_proj.weight")
        assert checkpoint.stored_types[name] == (kind if rows else FloatType.BFLOAT16)
        if rows:
            assert np.array_equal(checkpoint.tensor(name), rows.floats())
            assert rows.scales.shape == (outputs, -(-rest[0] // (kind.group or rest[0])))
            assert 0.8 < checkpoint.tensor(name).std() * rest[0] ** 0.5 < 1.2


@pytest.mark.parametrize("hidden_size", [256, 512])
def test_a_cpu_keeps_them_in_4_bits(folder, hidden_size):
    """Whatever scale unit gain asks for."""
    fields = SHAPE | {"hidden_size": hidden_size, "intermediate_size": 1024, "quantization_config": AWQ}
    (folder / "config.json").write_text(json.dumps(fields))
    checkpoint, _ = load_dummy(folder)
    planned = Numerics(MatrixKind.PACKED, KvDtype.INT8).weight_bytes(checkpoint.config, checkpoint.stored_types)
    assert 1 <= planned / PackedLlamaModel(checkpoint, 64).num_bytes < 1.1


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ({"quant_method": "fp8"}, "weights of fp8 cannot be made without its files"),
        (AWQ | {"bits": 8}, "its weights are awq of 8 bits; 4 bits are read"),
        (AWQ | {"version": "gemv_fast"}, "its weights are awq in the layout 'gemv_fast'"),
        (GPTQ | {"bits": 3}, "its weights are gptq of 3 bits; 4 and 8 bits are read"),
    ],
)
def test_what_no_file_or_the_configuration_alone_cannot_say_is_refused(folder, method, sentence):
    (folder / "config.json").write_text(json.dumps(SHAPE | {"quantization_config": method}))
    with pytest.raises(UnsupportedModelError, match=sentence):
        load_dummy(folder)


def test_a_folder_without_a_configuration_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"cannot read .*config\.json"):
        load_dummy(tmp_path)


@pytest.mark.parametrize("method", [None, AWQ])
@pytest.mark.parametrize("numbers", ["auto", "none"])
def test_an_executor_serves_them_and_says_what_they_are(folder, numbers, method):
    """With a tokenizer of bytes, as large as the vocabulary."""
    (folder / "config.json").write_text(json.dumps(SHAPE | {"quantization_config": method}))
    arguments = ["--model", str(folder), "--load-format", "dummy", "--quantization", numbers, "--num-threads", "1"]
    loaded = load(parse_config([*arguments, "--max-num-seqs", "2", "--kv-cache-memory", "4MiB"]))
    model = loaded.description.served_model()
    assert (model.has_dummy_weights, model.architecture, model.vocab_size) == (True, "gemma2", 300)
    assert loaded.description.welcome(b"i", b"k", 4).model == model


def test_the_shape_has_to_be_said(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--load-format", "dummy"])
    assert "--load-format dummy needs --model: a folder whose config.json says the shape" in capsys.readouterr().err
