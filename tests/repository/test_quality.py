"""`make quality`: the figures are what their names say, the text is used once, programs find what people see."""

import dataclasses
import hashlib
import json
import platform

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch.nn import functional
from typer.testing import CliRunner

from model_inputs import Row, inputs_of
from paceline_executor.numerics import (
    FLOAT32_NUMERICS,
    KvDtype,
    MatrixKind,
    Numerics,
    Quantization,
    choose_cpu_numerics,
)
from paceline_executor.testing.cpu import cpu_rig
from paceline_executor.testing.models import TINY_CONFIG, RandomCheckpoint, gguf_parts, tiny_checkpoint
from paceline_executor.weights import load_model, load_tokenizer
from paceline_kernels.compiler import jit
from quality.__main__ import app
from quality.measure import NUM_GIVEN, measure
from quality.text import prose, take, windows

PACKED = Numerics(MatrixKind.PACKED, KvDtype.FLOAT16)
PACKED_INT8 = Numerics(MatrixKind.PACKED, KvDtype.INT8)
WINDOW = 40


@pytest.fixture(autouse=True)
def _one_thread():
    """These models are too small for two."""
    jit.set_num_threads(1)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """A tiny model as a file, with a tokenizer of bytes, whose weights can be packed."""
    config = dataclasses.replace(TINY_CONFIG, num_heads=2, num_kv_heads=1, head_dim=32)
    return gguf_parts(RandomCheckpoint(config)).write(tmp_path_factory.mktemp("model") / "tiny.gguf")


def two_windows():
    token_ids = np.random.default_rng(0).integers(0, 512, 2 * WINDOW).tolist()
    return windows(token_ids, WINDOW)


def logits_of_one_batch(checkpoint, numerics, texts):
    """The logits at which tokens are predicted, computed as the executor does: the texts are rows of one batch."""
    block_size, num_texts, num_blocks = 16, len(texts), -(-WINDOW // 16) * len(texts)
    rig = cpu_rig(checkpoint, numerics=numerics, num_blocks=num_blocks, block_size=block_size)
    tables = np.arange(num_blocks)[::-1].reshape(num_texts, -1).tolist()
    inputs = inputs_of(*map(Row, texts, tables), block_size=block_size)
    logits = rig.model.device.run(lambda: rig.runner._model.hidden(inputs, rig.runner._kv_cache).clone())
    return logits.view(num_texts, WINDOW, -1)[:, NUM_GIVEN - 1 : -1].flatten(0, 1).double()


@pytest.mark.parametrize("numerics", [PACKED, PACKED_INT8], ids=["float16", "int8"])
def test_the_figures_equal_those_computed_from_one_batch_of_all_windows(numerics):
    checkpoint = tiny_checkpoint(num_heads=9, num_kv_heads=3, head_dim=32, intermediate_size=96)
    texts = two_windows()
    float32, fast = measure(checkpoint, [numerics], texts, WINDOW)
    targets = torch.tensor([token for text in texts for token in text[NUM_GIVEN:]])
    p, q = (logits_of_one_batch(checkpoint, kind, texts) for kind in (FLOAT32_NUMERICS, numerics))
    perplexities = [functional.cross_entropy(logits, targets).exp().item() for logits in (p, q)]
    divergence = (p.softmax(-1) * (p.softmax(-1) / q.softmax(-1)).log()).sum(-1).mean().item()
    assert [float32.perplexity, fast.perplexity] == pytest.approx(perplexities, rel=1e-5)
    assert fast.difference == pytest.approx(perplexities[1] / perplexities[0] - 1, abs=1e-5)
    assert fast.kl_divergence == pytest.approx(divergence, rel=1e-3)
    assert fast.kl_divergence > 0
    assert fast.same_best == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert fast.num_predicted == 2 * (WINDOW - NUM_GIVEN)


def test_float32_differs_in_nothing_from_itself():
    first, second = measure(tiny_checkpoint(), [FLOAT32_NUMERICS], [*two_windows(), range(NUM_GIVEN)], WINDOW)
    assert first == second
    assert (first.difference, first.standard_error, first.kl_divergence, first.same_best) == (0, 0, 0, 1)


@given(st.lists(st.integers(0, 9)), st.integers(2, 7), st.sampled_from([(), (100,)]))
def test_windows_hold_every_token_once_and_in_order(token_ids, size, first):
    cut = windows(token_ids, size, first)
    assert [token for window in cut for token in window[len(first) :]] == token_ids
    assert all(window[: len(first)] == first for window in cut)
    assert all(len(window) == size for window in cut[:-1])
    assert all(len(first) < len(window) <= size for window in cut)


def test_the_text_is_sentences_each_paragraph_once():
    paragraphs = prose().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) > 100
    assert all(paragraph.endswith(".") and paragraph[0].isupper() for paragraph in paragraphs)
    assert not any("\n" in paragraph or "::=" in paragraph or "***" in paragraph for paragraph in paragraphs)


def test_the_digest_is_that_of_the_tokens_taken(model_file):
    bundle = load_tokenizer(model_file)
    sample = take("The quick brown fox.", bundle, 7)
    taken = Tokenizer.from_str(bundle.tokenizer_json.decode()).decode(list(sample.token_ids))
    assert len(sample.token_ids) == 7
    assert "The quick brown fox.".startswith(taken)
    assert sample.sha256 == hashlib.sha256(taken.encode()).hexdigest()


def test_the_command_prints_a_table_and_writes_the_same_as_json(model_file, tmp_path):
    report = tmp_path / "quality.json"
    arguments = ["--model", str(model_file), "--tokens", "80", "--window", "40", "--json"]
    result = CliRunner().invoke(app, [*arguments, str(report)])
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    assert json.loads(CliRunner().invoke(app, [*arguments, "-"]).stdout.splitlines()[-1]) == found
    float32, default, float16 = found["rows"]
    assert [(row["weights"], row["kv_cache"]) for row in found["rows"]] == [
        ("float32", "float32"),
        ("packed", "int8"),
        ("packed", "float16"),
    ]
    assert (found["float32"], found["fast"]) == (float32["perplexity"], default["perplexity"])
    used = choose_cpu_numerics(Quantization.AUTO, None, load_model(model_file)[0].config, 16)
    assert (default["weights"], default["kv_cache"]) == (used.weights, used.kv.value)
    assert default["perplexity"] != float16["perplexity"]
    assert {"kl_divergence", "same_best", "standard_error"} < set(float16) == set(float32)
    assert (found["model"], found["python"]) == ("tiny.gguf", platform.python_version())
    assert (found["num_tokens"], found["window"], found["num_predicted"]) == (80, 40, 48)
    assert f"{default['perplexity']:.4f}" in result.output
    assert found["text_sha256"] in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "257"], "the model takes 256 tokens at most"),
        (["--window", "64", "--tokens", "9000000"], "the text has"),
        (["--model", "nowhere.gguf"], "nowhere.gguf"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_sentence(model_file, arguments, message):
    result = CliRunner().invoke(app, ["--model", str(model_file), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_model_without_fast_numbers_is_refused(tmp_path):
    """It would be compared with itself."""
    path = gguf_parts(RandomCheckpoint()).write(tmp_path / "tiny.gguf")
    result = CliRunner().invoke(app, ["--model", str(path)])
    assert result.exit_code == 2
    assert "computes in float32" in " ".join(result.output.split())
