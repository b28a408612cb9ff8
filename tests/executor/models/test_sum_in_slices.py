"""A model whose heads and gates are shared out among ranks has the bits of the whole one: sums over them are trees."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from executor_rig.cpu import shared_device
from executor_rig.driving import Draw, Driver
from model_inputs import Row, inputs_of
from paceline_executor.limits import RowLimits
from paceline_executor.models.interface import KvCache
from paceline_executor.models.layers import HostWeights, num_slices
from paceline_executor.models.llama import LlamaModel
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.runner.cpu import CpuModel
from paceline_kernels.linear import sum_of_slices
from random_models import FAMILY_CONFIGS, TINY_CONFIG, RandomCheckpoint

LENGTH, NUM_BLOCKS, BLOCK_SIZE = 90, 24, 16
LIMITS = RowLimits(4, LENGTH, 256, NUM_BLOCKS, BLOCK_SIZE, TINY_CONFIG.vocab_size, 0)
DRAWS = [Draw(num_logprobs=4), Draw(temperature=0.8, top_p=0.9, seed=5, num_logprobs=4)]
CUT_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
CUT_COLUMNS = ("o_proj.weight", "down_proj.weight")


class CutCheckpoint:
    """What a rank has of a checkpoint: rows that make its heads and gates, and the columns that these feed."""

    def __init__(self, whole, rank, num_ranks):
        self.whole, self.rank, self.num_ranks = whole, rank, num_ranks
        sizes = ("num_heads", "num_kv_heads", "intermediate_size")
        self.config = replace(whole.config, **{size: getattr(whole.config, size) // num_ranks for size in sizes})

    def tensor(self, name):
        values = self.whole.tensor(name)
        if name.split(".")[-2] in CUT_ROWS:
            return np.split(values, self.num_ranks)[self.rank]
        if name.endswith(CUT_COLUMNS):
            return np.ascontiguousarray(np.split(values, self.num_ranks, axis=1)[self.rank])
        return values


def without_sums(layer, slices):
    """A rank's: what follows a sum over all ranks is not for one of them."""
    output, down = (replace(each, bias=None, slices=slices) for each in (layer.attention_output, layer.down))
    return replace(layer, attention_output=output, down=down, attention_post_norm=None, feed_forward_post_norm=None)


class CutModel(LlamaModel):
    """The ranks take turns in one thread, each with the keys and values of its heads."""

    def __init__(self, checkpoint, num_ranks):
        super().__init__(HostWeights(checkpoint), LENGTH)
        self.ranks = [
            LlamaModel(HostWeights(CutCheckpoint(checkpoint, rank, num_ranks)), LENGTH) for rank in range(num_ranks)
        ]
        slices = num_slices(checkpoint.config) // num_ranks
        layers = zip(*([without_sums(layer, slices) for layer in rank._layers] for rank in self.ranks), strict=True)
        self.parts = {id(layer): parts for layer, parts in zip(self._layers, layers, strict=True)}
        self.caches = {}

    def _attend(self, layer, hidden, inputs, cache):
        if id(layer) not in self.caches:
            heads = [each.chunk(len(self.ranks), dim=1) for each in (cache.keys, cache.values)]
            self.caches[id(layer)] = [
                KvCache(*(each.clone().contiguous() for each in of_rank)) for of_rank in zip(*heads, strict=True)
            ]
        each_rank = zip(self.ranks, self.parts[id(layer)], self.caches[id(layer)], strict=True)
        partials = [rank._attend(part, hidden, inputs, own) for rank, part, own in each_rank]
        return self._normalised(whole_sum(partials, layer.attention_output.bias), layer.attention_post_norm)

    def _feed(self, layer, hidden, inputs):
        each_rank = zip(self.ranks, self.parts[id(layer)], strict=True)
        partials = [rank._feed(part, hidden, inputs) for rank, part in each_rank]
        return self._normalised(whole_sum(partials, layer.down.bias), layer.feed_forward_post_norm)


def whole_sum(partials, bias):
    total = sum_of_slices(torch.stack(partials))
    return total if bias is None else total + bias


def random_tokens(count, seed):
    return np.random.default_rng(seed).integers(0, TINY_CONFIG.vocab_size, count).tolist()


def logits_of(model, config):
    """Of all tokens of a prompt, in chunks down to single tokens."""
    shape = (config.num_layers, NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    cache, tokens = KvCache(torch.zeros(shape), torch.zeros(shape)), random_tokens(LENGTH, 1)
    cuts = (0, 1, 30, 31, 64, 89, LENGTH)
    rows = (Row(tokens[start:end], range(NUM_BLOCKS), start) for start, end in pairwise(cuts))
    return torch.cat([model.forward(inputs_of(row, block_size=BLOCK_SIZE), cache).clone() for row in rows])


def answers_of(model, config):
    """Tokens and log-probabilities, greedy and drawn by a seed, beside each other and with prompts in chunks."""
    driver = Driver(CpuModel(shared_device(), model, config, FLOAT32_NUMERICS).runner(LIMITS))
    rows = [driver.add(random_tokens(20 + 9 * seed, seed), DRAWS[seed % 2], max_chunk=11) for seed in range(4)]
    driver.run(rows, 24)
    return [(row.output, row.logprobs) for row in rows]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_model_cut_over_ranks_has_the_bits_of_the_whole_one(family, num_ranks):
    checkpoint = RandomCheckpoint(replace(FAMILY_CONFIGS[family], num_heads=8, num_kv_heads=4))
    config, whole = checkpoint.config, LlamaModel(HostWeights(checkpoint), LENGTH)
    cut = CutModel(checkpoint, num_ranks)
    assert torch.equal(logits_of(cut, config), logits_of(whole, config))
    assert answers_of(CutModel(checkpoint, num_ranks), config) == answers_of(whole, config)


@pytest.mark.parametrize(
    ("num_kv_heads", "intermediate_size", "slices"),
    [(3, 1536, 3), (8, 8192, 8), (32, 8192, 8), (2, 4864, 2), (1, 96, 1), (10, 17_920, 2), (5, 2560, 5), (9, 96, 3)],
)
def test_the_number_of_slices_is_a_models_alone(num_kv_heads, intermediate_size, slices):
    """8 KV heads or more are 8 slices at most, an odd number has its own."""
    config = replace(TINY_CONFIG, num_kv_heads=num_kv_heads, intermediate_size=intermediate_size)
    assert num_slices(config) == slices
