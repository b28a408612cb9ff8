"""A trained mixture of experts knows a text well, and worse when anything of its router is wrong."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from model_inputs import Row, inputs_of
from paceline_executor.models.interface import KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.packed_llama import PackedLlamaModel
from paceline_executor.weights import ModelConfig, load_checkpoint
from trained_mixture import FOLDER, tokens_of_text
from trained_mixture.training import NUM_STEPS, save, train

WINDOW, NUM_WINDOWS = 256, 8
BLOCKS = WINDOW // 16


@dataclass
class Changed:
    """The trained one with another configuration, or with experts in each other's places."""

    folder: Path
    config: ModelConfig
    places: dict[str, str]

    def tensor(self, name):
        """By its place."""
        place = next((place for place in self.places if place in name), "")
        return load_checkpoint(self.folder).tensor(name.replace(place, self.places[place]) if place else name)


def held_out():
    """Token ids that it was not trained with: [NUM_WINDOWS, WINDOW]."""
    return torch.tensor(tokens_of_text()[1][: NUM_WINDOWS * WINDOW]).view(NUM_WINDOWS, WINDOW)


def perplexity_of(logits):
    """logits: [NUM_WINDOWS, WINDOW, vocab]."""
    return math.exp(functional.cross_entropy(logits[:, :-1].flatten(0, 1), held_out()[:, 1:].flatten()))


def perplexity(model, config, kv_dtype=torch.float32):
    """As the model computes it."""
    slot = config.head_dim + (4 if kv_dtype == torch.int8 else 0)
    shape = config.num_layers, NUM_WINDOWS * BLOCKS, config.num_kv_heads, 16, slot
    rows = [
        Row(tokens, range(index * BLOCKS, (index + 1) * BLOCKS)) for index, tokens in enumerate(held_out().tolist())
    ]
    kv_cache = KvCache(*(torch.zeros(shape, dtype=kv_dtype) for _ in range(2)))
    return perplexity_of(model.forward(inputs_of(*rows, block_size=16), kv_cache).view(NUM_WINDOWS, WINDOW, -1))


def in_float32(folder=FOLDER, places=None, **routing):
    """The perplexity of the trained one, or of one that is wrong by so much."""
    config = load_checkpoint(folder).config
    experts = replace(config.experts, routing=replace(config.experts.routing, **routing))
    changed = Changed(folder, replace(config, experts=experts), places or {})
    return perplexity(LlamaModel(HostWeights(changed), WINDOW), config)


def test_it_knows_a_text_as_well_as_by_transformers():
    """Less than half as surprised as by the frequencies of bytes alone."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        theirs = perplexity_of(oracle(held_out(), use_cache=False).logits)
    frequencies = np.unique(held_out().numpy(), return_counts=True)[1] / held_out().numel()
    assert in_float32() == pytest.approx(theirs, rel=1e-4)
    assert theirs < math.exp(-(frequencies * np.log(frequencies)).sum()) / 2


WRONG = {
    "two experts in each other's places": {"places": {".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}},
    "weights that are not renormalised": {"renormalises": False},
    "one expert fewer": {"top_k": 1},
    "one expert more": {"top_k": 3},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_it_knows_a_text_worse_with(wrong):
    """By more than 5 %; a third expert, of little weight, does less harm."""
    assert in_float32(**WRONG[wrong]) > (1.01 if wrong == "one expert more" else 1.05) * in_float32()


def test_packed_it_knows_a_text_nearly_as_well():
    """Within 1 %."""
    checkpoint = load_checkpoint(FOLDER)
    packed = perplexity(PackedLlamaModel(checkpoint, WINDOW), checkpoint.config, torch.int8)
    assert packed == pytest.approx(in_float32(), rel=0.01)


def test_with_matrices_of_float8_it_knows_a_text_nearly_as_well():
    """Within 1 %; its router stays as it is."""
    checkpoint = load_checkpoint(FOLDER)
    rounded = perplexity(LlamaModel(HostWeights(checkpoint, is_rounded=True), WINDOW), checkpoint.config)
    assert rounded != in_float32()
    assert rounded == pytest.approx(in_float32(), rel=0.01)


@pytest.mark.soak
def test_it_is_what_its_training_makes(tmp_path):
    save(train(NUM_STEPS), tmp_path)
    assert in_float32(tmp_path) == pytest.approx(in_float32(), rel=0.03)
