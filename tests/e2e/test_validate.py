"""`paceline validate` with real executors: a model, others like it, and others that it cannot be compared with."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from random_models import TINY_CONFIG, RandomCheckpoint, byte_level_metadata, gguf_parts

COMMAND = [sys.executable, "-m", "paceline_cli", "validate"]
CPU = ["--runner", "cpu", "--num-threads", "1"]
REQUEST = {"data": None, "num_tokens": 4096, "now": "2026-01-02T00:00:00"}


class Noisy(RandomCheckpoint):
    """The same model with other matrices, a little or altogether."""

    def __init__(self, noise, config=TINY_CONFIG):
        super().__init__(config)
        self._noise = noise

    def tensor(self, name):
        values, other = super().tensor(name), RandomCheckpoint(self.config, seed=1).tensor(name)
        return values if values.ndim == 1 else (values + self._noise * other).astype(np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Files of tiny models by name."""
    folder = tmp_path_factory.mktemp("models")

    def written(name, checkpoint=None, **metadata):
        parts = gguf_parts(checkpoint or RandomCheckpoint())
        parts.metadata |= {f"tokenizer.{key}": value for key, value in metadata.items()}
        return parts.write(folder / f"{name}.gguf")

    others = byte_level_metadata(("t h", "i n", "e r"))
    other_tokens = {key.removeprefix("tokenizer."): value for key, value in others.items()}
    spoilt = gguf_parts(RandomCheckpoint())
    spoilt.tensors["output_norm.weight"][0][:] = 3e38
    return {
        "base": written("base"),
        "near": written("near", Noisy(0.001)),
        "far": written("far", Noisy(2.0)),
        "template": written("template", chat_template="{{ messages }}"),
        "tokens": written("tokens", **other_tokens),
        "short": written("short", RandomCheckpoint(replace(TINY_CONFIG, max_model_len=128))),
        "spoilt": spoilt.write(folder / "spoilt.gguf"),
    }


def run(*command, **options):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=280, **options)


@pytest.mark.parametrize(
    ("candidate", "data", "code"),
    [
        ("far", None, 1),
        ("near", '{"messages": [{"role": "user", "content": "Hello, and what is the answer?"}]}\n' * 20, 10),
        pytest.param("near", None, 0, marks=pytest.mark.slow),
    ],
    ids=["far", "too short", "near"],
)
def test_a_checkpoint_is_validated_against_another(models, tmp_path, candidate, data, code):
    own = []
    if data is not None:
        (tmp_path / "data.txt").write_text(data)
        own = ["--data", tmp_path / "data.txt"]
    arguments = [models[candidate], "--against", models["base"], "--tokens", "4200", "--json", *own, *CPU]
    ended = run(*COMMAND, *arguments)
    assert ended.returncode == code, ended.stderr
    found = json.loads(ended.stdout)
    prose = found["texts"]["prose"]
    assert prose["num_windows"] >= 16
    assert ended.returncode == {"within": 0, "beyond": 1, "undecided": 10}[found["verdict"]]
    assert found["base"]["computed"] == "none"
    assert prose["num_answers"] == 8
    assert ("data" in found["texts"]) == (data is not None)
    assert "candidate: predicting (prose)" in ended.stderr


@pytest.fixture(scope="module")
def predicted(models, tmp_path_factory):
    """The folder in which the base left what it predicts."""
    folder = tmp_path_factory.mktemp("validation")
    (folder / "request.json").write_text(json.dumps(REQUEST))
    ended = run(sys.executable, "-m", "paceline_executor", "validate-base", folder, "--model", models["base"], *CPU)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.parametrize(
    ("candidate", "options", "code", "message"),
    [
        ("template", [], 3, "the chat templates differ"),
        ("tokens", [], 3, "the tokenizers differ"),
        ("short", [], 3, "it takes 128 tokens at most, and the base 256 or more"),
        ("spoilt", [], 3, "the model's logits are no numbers"),
        ("base", ["--runner", "simulated"], 2, "--runner simulated"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(models, predicted, candidate, options, code, message):
    program = [sys.executable, "-m", "paceline_executor", "validate-candidate", predicted]
    ended = run(*program, "--model", models[candidate], *CPU, *options)
    assert ended.returncode == code
    assert message in ended.stderr
    assert not (predicted / "result.json").exists()


def test_before_there_is_a_base_a_candidate_is_only_opened(models, tmp_path):
    """So that a wrong path costs a second, not the base's minutes."""
    program = [sys.executable, "-m", "paceline_executor", "validate-candidate", tmp_path, *CPU]
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))
    assert run(*program, "--model", models["near"]).returncode == 0
    assert run(*program, "--model", tmp_path / "none").returncode == 3
    assert [path.name for path in tmp_path.iterdir()] == ["request.json"]
