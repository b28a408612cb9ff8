"""Folders that are damaged anywhere load, or are refused in one line: no other exception, and no crash.

The same for GGUF files is in `test_weights_gguf_header`. What changes a weight into another number is noticed by
nobody here: a checksum tells, and models that are known by name or come from the hub have one.
"""

import json
import subprocess
import sys
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.process.command import ExitCode
from paceline_executor.errors import ModelCorruptError, ModelError
from paceline_executor.weights import load_model
from random_models import BYTE_LETTERS, TINY_CONFIG, RandomCheckpoint, gguf_parts, llama_fields

SCALING = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
CONFIG = llama_fields(TINY_CONFIG) | {"rope_scaling": SCALING, "hidden_act": "silu"}
SPECIAL = ["<|im_start|>", "<|im_end|>"]
WEIRD = st.sampled_from(
    [None, True, 0, -1, 1, 3, 2**31, 2**64, 0.5, 1e308, float("nan"), float("inf"), "", "x", "\ud800", [], [[]], {}]
)


def byte_tokenizer():
    """A byte-level tokenizer with one merge."""
    vocabulary = {text: index for index, text in enumerate([*SPECIAL, *BYTE_LETTERS, "he"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_model(folder):
    """A sound folder; returns its files by name."""
    checkpoint = RandomCheckpoint()
    save_file(
        {name: checkpoint.tensor(name) for name in checkpoint.config.tensor_shapes()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": "x"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "temperature": 0.7}))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder and the files that it should have."""
    folder = tmp_path_factory.mktemp("damaged")
    return folder, write_model(folder)


def put(sound, name, data):
    """The folder with one file that is not as it should be."""
    folder, files = sound
    for each, content in files.items():
        wanted = data if each == name else content
        if each == name or (folder / each).stat().st_size != len(wanted) or (folder / each).read_bytes() != wanted:
            (folder / each).write_bytes(wanted)
    return folder


def read_everything(folder):
    """What an executor reads at its start."""
    checkpoint, _ = load_model(folder)
    for name in checkpoint.config.tensor_shapes():
        checkpoint.tensor(name)


def refuses_or_loads(folder):
    """Read the model; an error is the model's, and one line."""
    try:
        read_everything(folder)
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017 (success is fine too)


FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data(), name=st.sampled_from(FILES))
def test_bytes_that_are_cut_or_changed_are_survived(sound, data, name):
    damaged = bytearray(sound[1][name])
    places = st.integers(0, min(len(damaged), 2000) - 1) | st.integers(0, len(damaged) - 1)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=3)):
        damaged[place] = value
    refuses_or_loads(put(sound, name, bytes(damaged[: data.draw(st.none() | places)])))


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data(), name=st.sampled_from([name for name in FILES if name.endswith("json")]))
def test_fields_that_are_missing_or_mean_nothing_are_survived(sound, data, name):
    document = json.loads(sound[1][name])
    for _ in range(data.draw(st.integers(1, 2))):
        inside = document
        while True:
            key = data.draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
            if not isinstance(inside[key], dict | list) or not inside[key] or data.draw(st.booleans()):
                break
            inside = inside[key]
        if data.draw(st.booleans()):
            inside[key] = deepcopy(data.draw(WEIRD))
        elif len(inside) > 1:
            del inside[key]
    refuses_or_loads(put(sound, name, json.dumps(document).encode()))


PANIC = byte_tokenizer().to_str().replace('"continuing_subword_prefix":null', '"continuing_subword_prefix":"xxxxx"')


def test_a_tokenizer_that_makes_the_library_panic_is_damaged(sound):
    assert "xxxxx" in PANIC
    with pytest.raises(ModelCorruptError, match=r"tokenizer\.json is damaged: the tokenizers library refuses it"):
        load_model(put(sound, "tokenizer.json", PANIC.encode()))


def test_a_tokenizer_of_another_model_is_refused(sound):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<added {number}>" for number in range(20)])
    load_model(put(sound, "tokenizer.json", tokenizer.to_str().encode()))
    config = json.dumps(CONFIG | {"vocab_size": 258}).encode()
    checkpoint = RandomCheckpoint()
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.config.tensor_shapes()}
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:258]
    folder = put(sound, "config.json", config)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelCorruptError, match=r"lists 259 tokens, and the model has 258"):
        load_model(folder)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_process_with_a_damaged_model_never_listens_for_long(sound, tmp_path, kind):
    if kind == "folder":
        path = put(sound, "tokenizer.json", sound[1]["tokenizer.json"][:-20])
    else:
        path = gguf_parts(RandomCheckpoint()).write(tmp_path / "flipped.gguf")
        data = bytearray(path.read_bytes())
        data[data.index(b"blk.1.ffn_up.weight") + 24] ^= 0x40  # the innermost dimension of its shape
        path.write_bytes(data)
    command = [sys.executable, "-m", "paceline_executor", "--model", str(path), "--metrics-port", "0"]
    command += ["--port", "0", "--health-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == ExitCode.MODEL
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("paceline-executor: error: ")
    assert '"ready"' not in done.stdout
