"""Mixtures of experts in float32, against transformers."""

import pytest
import torch

from executor_rig.cpu import cpu_runner
from executor_rig.driving import Driver
from model_inputs import Row, inputs_of
from paceline_executor.models.interface import KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.weights import load_checkpoint
from tiny_mixtures import CONFIGS, VOCAB, random_mixture

BLOCK_SIZE = 16


def written(folder, name):
    """A random model as transformers computes it, and as we read what it wrote."""
    model = random_mixture(name)
    model.save_pretrained(folder)
    return model, load_checkpoint(folder)


def random_tokens(length=90, seed=0):
    """Random token ids."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def new_cache(config, num_blocks):
    """Nothing is written in it."""
    shape = (config.num_layers, num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return KvCache(*(torch.full(shape, float("nan")) for _ in range(2)))


def logits_of(checkpoint, tokens, cuts=()):
    """The logits of all tokens, computed in the chunks that the cuts make, each reading what those before it left."""
    num_blocks, found = -(-len(tokens) // BLOCK_SIZE), []
    model, cache = LlamaModel(HostWeights(checkpoint), len(tokens)), new_cache(checkpoint.config, num_blocks)
    for start, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        row = Row(tokens[start:end], range(num_blocks), start)
        found.append(model.forward(inputs_of(row, block_size=BLOCK_SIZE), cache))
    return torch.cat(found)


def theirs(model, tokens):
    """The logits of all tokens as transformers computes them, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def assert_near(found, expected):
    """To 1e-4 of how far logits lie apart."""
    assert (found - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(tmp_path, name):
    """At once, and bit for bit the same in chunks down to single tokens, and beside other rows."""
    oracle, checkpoint = written(tmp_path, name)
    tokens = random_tokens()
    at_once = logits_of(checkpoint, tokens)
    assert_near(at_once, theirs(oracle, tokens))
    assert torch.equal(logits_of(checkpoint, tokens, cuts=(1, 30, 31, 64, 89)), at_once)
    rows = [Row(random_tokens(7, seed=1), range(6, 12)), Row(tokens, range(6)), Row([5], range(12, 18))]
    together = LlamaModel(HostWeights(checkpoint), 96).forward(
        inputs_of(*rows, block_size=BLOCK_SIZE), new_cache(checkpoint.config, 18)
    )
    assert torch.equal(together[7:-1], at_once)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2049])
@pytest.mark.parametrize("name", CONFIGS)
def test_short_and_long_prompts_equal_those_of_transformers(tmp_path, name, length):
    oracle, checkpoint = written(tmp_path, name)
    tokens = random_tokens(length)
    assert_near(logits_of(checkpoint, tokens), theirs(oracle, tokens))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "qwen2_moe" else [pytest.mark.slow]) for name in CONFIGS]
)
def test_greedy_tokens_of_a_batch_equal_those_of_transformers(tmp_path, name):
    """64 of each of three prompts, which enter in chunks."""
    oracle, checkpoint = written(tmp_path, name)
    prompts = [random_tokens(length, seed=length) for length in (3, 19, 50)]
    driver = Driver(cpu_runner(checkpoint, num_blocks=32, block_size=BLOCK_SIZE))
    ours = driver.run([driver.add(prompt, max_chunk=12) for prompt in prompts], 64)
    for prompt, output in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        greedy = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
        generated = oracle.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        assert output == generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe"])
def test_a_row_that_its_router_cannot_place_spoils_no_other(tmp_path, name):
    """The others have the bits that they have alone."""
    checkpoint = written(tmp_path, name)[1]
    model = LlamaModel(HostWeights(checkpoint), 16)
    feed_forward = model._layers[2].feed_forward
    x, stream, norm = torch.randn(5, 64), torch.randn(5, 64), torch.ones(64)

    def fed(x, stream):
        return feed_forward(x, norm, 1e-6, inputs_of(Row([0], [0]), block_size=16).splits, stream.clone())

    together = fed(x.index_fill(0, torch.tensor([2]), float("nan")), stream)
    assert together[2].isnan().all()
    for row in (0, 1, 3, 4):
        assert torch.equal(together[row], fed(x[row : row + 1], stream[row : row + 1])[0])
