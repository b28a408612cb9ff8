"""The families of models, each in float32 against transformers, and packed against float32."""

import math

import numpy as np
import pytest
import torch
import transformers

from executor_rig.cpu import cpu_runner
from executor_rig.driving import Driver
from model_inputs import Row, inputs_of
from paceline_executor.errors import UnsupportedModelError
from paceline_executor.models.interface import KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.packed_llama import PackedLlamaModel
from paceline_executor.models.registry import ARCHITECTURES, build_model
from paceline_executor.numerics import MatrixKind
from paceline_executor.weights import load_checkpoint
from paceline_kernels.decoder import AuxHidden
from random_models import tiny_checkpoint

VOCAB, LENGTH, BLOCK_SIZE, NUM_BLOCKS = 256, 90, 16, 20
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"sliding_window": 20, "layer_types": [SLIDING, FULL, SLIDING]}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 20}),
    "qwen2": (transformers.Qwen2Config, WINDOW | {"use_sliding_window": True, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"attention_bias": True}),
    # A scale of queries, and caps, that are low enough to be felt.
    "gemma2": (
        transformers.Gemma2Config,
        WINDOW | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        WINDOW | {"rope_parameters": {FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, SLIDING: None}},
    ),
}
ORIGINAL = {"original_max_position_embeddings": 32}
FACTORS = {
    "short_factor": np.linspace(1, 2, 16).tolist(),
    "long_factor": np.linspace(1, 9, 16).tolist(),
}
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": ORIGINAL | {"factor": 4.0},
    "yarn, bounds as they are": ORIGINAL
    | {"factor": 4.0, "truncate": False, "beta_fast": 8.0, "attention_factor": 1.3},
    "llama3": ORIGINAL | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": ORIGINAL | FACTORS | {"factor": 4.0},
}


def written(folder, family, **changes):
    """A random model of the family as transformers computes it, and as we read what it wrote."""
    config_class, options = FAMILIES[family]
    torch.manual_seed(0)
    config = config_class(**(SIZES | options | changes), attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    centre = 0.0 if family.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, math.sqrt(1 / weight.shape[1]))
            else:
                weight.normal_(0.0 if name.endswith("bias") else centre, 0.2)
    model.save_pretrained(folder)
    return model, load_checkpoint(folder)


def random_tokens(length=LENGTH, seed=0):
    """Random token ids."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).int()


def new_cache(config, dtype):
    """An unwritten cache for three hundred tokens and more."""
    slot = config.head_dim + (4 if dtype == torch.int8 else 0)
    shape = (config.num_layers, NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, slot)
    fill = -1 if dtype == torch.int8 else float("nan")
    return KvCache(*(torch.full(shape, fill, dtype=dtype) for _ in range(2)))


def logits_of(model, config, tokens, cuts=(), dtype=torch.float32):
    """The logits of all tokens, computed in the chunks that the cuts make, each reading what those before it left."""
    cache, found = new_cache(config, dtype), []
    ends = (*cuts, len(tokens))
    for start, end in zip((0, *cuts), ends, strict=True):
        inputs = inputs_of(Row(tokens[start:end].tolist(), range(NUM_BLOCKS), start), block_size=BLOCK_SIZE)
        found.append(model.forward(inputs, cache).clone())
    return torch.cat(found)


def hidden_states_of(model, config, tokens, layers, dtype=torch.float32):
    """What flows into these layers, of all tokens: [layers, tokens, hidden]."""
    inputs = inputs_of(Row(tokens.tolist(), range(NUM_BLOCKS)), block_size=BLOCK_SIZE, only_last=True)
    aux = AuxHidden(layers, torch.full((len(tokens), len(layers), config.hidden_size), float("nan")))
    model.forward(inputs, new_cache(config, dtype), aux=aux)
    return aux.states.transpose(0, 1)


def theirs(model, tokens):
    """The logits of all tokens as transformers computes them, without a cache."""
    with torch.no_grad():
        return model(tokens[None].long(), use_cache=False).logits[0]


def float32_model(checkpoint, max_model_len=LENGTH):
    """The measure of the packed model."""
    return LlamaModel(HostWeights(checkpoint), max_model_len)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(tmp_path, family):
    """To 1e-4, for a prompt longer than the window, at once and in chunks down to single tokens."""
    oracle, checkpoint = written(tmp_path, family)
    tokens, model = random_tokens(), float32_model(checkpoint)
    at_once = logits_of(model, checkpoint.config, tokens)
    assert (at_once - theirs(oracle, tokens)).abs().max() < 1e-4
    assert torch.equal(logits_of(model, checkpoint.config, tokens, cuts=(1, 30, 31, 64, 89)), at_once)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_those_of_transformers(tmp_path, family):
    """In float32 to 1e-4; of packed weights near that. transformers' number i is what flows into layer i."""
    oracle, checkpoint = written(tmp_path, family)
    tokens, layers = random_tokens(40), (2, 1)
    with torch.no_grad():
        states = oracle(tokens[None].long(), use_cache=False, output_hidden_states=True).hidden_states
    expected = torch.stack([states[layer][0] for layer in layers])
    found = hidden_states_of(float32_model(checkpoint), checkpoint.config, tokens, layers)
    assert (found - expected).abs().max() < 1e-4 * expected.std()
    packed = PackedLlamaModel(checkpoint, LENGTH)
    found = hidden_states_of(packed, checkpoint.config, tokens, layers, torch.int8)
    assert (found - expected).square().mean().sqrt() < 0.05 * expected.std()


HEADS = {
    "like the default model": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
    "one KV head": {"num_key_value_heads": 1, "head_dim": 12},
    "as many KV heads as heads": {
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 10,
    },
}


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_logits_of_any_number_and_size_of_heads_equal_those_of_transformers(tmp_path, heads):
    """At every position of a prompt that spans segments of attention."""
    oracle, checkpoint = written(tmp_path, "llama", max_position_embeddings=300, **heads)
    tokens = random_tokens(300)
    ours = logits_of(float32_model(checkpoint, 300), checkpoint.config, tokens)
    assert (ours - theirs(oracle, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "gemma3" else [pytest.mark.slow]) for name in FAMILIES]
)
def test_greedy_tokens_equal_those_of_transformers(tmp_path, family):
    oracle, checkpoint = written(tmp_path, family)
    prompts = [random_tokens(length, seed=length).tolist() for length in (3, 19, 50)]
    driver = Driver(cpu_runner(checkpoint, num_blocks=32, block_size=BLOCK_SIZE))
    ours = driver.run([driver.add(prompt, max_chunk=12) for prompt in prompts], 15)
    for prompt, output in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        greedy = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        generated = oracle.generate(ids, attention_mask=torch.ones_like(ids), **greedy)
        assert output == generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ROPES)
def test_scaled_rotations_equal_those_of_transformers(tmp_path, name):
    """In a context several times the trained one.

    Served for exactly this context, so that what transformers chooses by its length is what we chose at the start.
    """
    kind = name.partition(",")[0]
    parameters = ROPES[name] | {"rope_type": kind, "rope_theta": 1000.0}
    trained = {"max_position_embeddings": 32} if kind == "dynamic" else {}
    oracle, checkpoint = written(tmp_path, "llama", rope_parameters=parameters, **trained)
    tokens = random_tokens()
    ours = logits_of(float32_model(checkpoint), checkpoint.config, tokens)
    assert (ours - theirs(oracle, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_service_within_the_trained_context_rotates_as_trained(tmp_path, name):
    """Where the longest context that is served is no longer than it; in a longer one short requests differ."""
    trained = {"max_position_embeddings": 32} if name == "dynamic" else {}
    parameters = ROPES[name] | {"rope_type": name, "rope_theta": 1000.0}
    oracle, checkpoint = written(tmp_path, "llama", rope_parameters=parameters, **trained)
    tokens = random_tokens(30)
    expected = theirs(oracle, tokens)
    short, long = (
        logits_of(float32_model(checkpoint, max_model_len), checkpoint.config, tokens) for max_model_len in (32, 90)
    )
    assert (short - expected).abs().max() < 1e-4
    assert (long - expected).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=["float16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_are_near_those_in_float32(tmp_path, family, dtype):
    """Off by what int8 weights and activations cost, a few hundredths of the logits' spread on average.

    Any part left out costs a tenth of it and more. In chunks they have the same bits.
    """
    _, checkpoint = written(tmp_path, family)
    config, tokens = checkpoint.config, random_tokens()
    exact = logits_of(float32_model(checkpoint), config, tokens)
    packed = PackedLlamaModel(checkpoint, LENGTH)
    at_once = logits_of(packed, config, tokens, dtype=dtype)
    errors = (at_once - exact) / exact.std()
    assert errors.square().mean().sqrt() < 0.05
    assert errors.abs().max() < 0.3
    assert torch.equal(logits_of(packed, config, tokens, cuts=(1, 30, 31, 64, 89), dtype=dtype), at_once)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("weights", "model"), [(MatrixKind.DENSE, LlamaModel), (MatrixKind.PACKED, PackedLlamaModel)])
def test_llama_and_its_relatives_are_computed_by_the_model_of_their_weights(weights, model, architecture):
    checkpoint = tiny_checkpoint(head_dim=32, intermediate_size=96, architecture=architecture)
    assert isinstance(build_model(checkpoint, 256, weights), model)


@pytest.mark.parametrize("weights", MatrixKind)
def test_an_unknown_architecture_is_refused_by_name(weights):
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; this version runs: gemma2, gemma3"):
        build_model(tiny_checkpoint(architecture="mamba"), 256, weights)
