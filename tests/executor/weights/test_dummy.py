"""Weights that are invented: of the shape that a config.json says, served like others, and told to be so."""

import json
from dataclasses import replace

import numpy as np
import pytest

from paceline_executor.config import parse_config
from paceline_executor.errors import ModelNotFoundError
from paceline_executor.start.loading import load
from paceline_executor.weights import load_dummy
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


def test_a_folder_without_a_configuration_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"cannot read .*config\.json"):
        load_dummy(tmp_path)


@pytest.mark.parametrize("numbers", ["auto", "none"])
def test_an_executor_serves_them_and_says_what_they_are(folder, numbers):
    """With a tokenizer of bytes, as large as the vocabulary."""
    arguments = ["--model", str(folder), "--load-format", "dummy", "--quantization", numbers, "--num-threads", "1"]
    loaded = load(parse_config([*arguments, "--max-num-seqs", "2", "--kv-cache-memory", "4MiB"]))
    model = loaded.description.served_model()
    assert (model.has_dummy_weights, model.architecture, model.vocab_size) == (True, "gemma2", 300)
    assert loaded.description.welcome(b"i", b"k", 4).model == model


def test_the_shape_has_to_be_said(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--load-format", "dummy"])
    assert "--load-format dummy needs --model: a folder whose config.json says the shape" in capsys.readouterr().err
