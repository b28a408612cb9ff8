"""The Llama model against an independent implementation, transformers, on random weights."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.testing.driving import Driver
from paceline_executor.testing.models import tiny_checkpoint

SHAPES = {
    "like the default model": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 16},
    "one KV head": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 12},
    "as many KV heads as heads": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 10, "num_layers": 3},
    "a head of its own": {"tie_word_embeddings": False},
}


def oracle(checkpoint):
    """transformers' Llama with the checkpoint's weights."""
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_model_len,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=config.tie_word_embeddings,
            attention_bias=False,
            mlp_bias=False,
        )
    )
    weights = {name: torch.from_numpy(checkpoint.tensor(name)) for name in config.tensor_shapes()}
    result = model.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    model.tie_weights()
    return model.eval()


def one_row_inputs(token_ids, block_size):
    """A batch of one row that computes all its tokens and wants all their logits."""
    positions = torch.arange(len(token_ids), dtype=torch.int32)
    return ForwardInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=positions,
        slot_mapping=positions.long(),
        cu_seqlens=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        context_lens=torch.tensor([len(token_ids)], dtype=torch.int32),
        block_tables=torch.arange(-(-len(token_ids) // block_size), dtype=torch.int32)[None],
        logit_tokens=positions.clone(),
    )


def random_ids(length, vocab_size=512, seed=0):
    """Random token ids."""
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_those_of_transformers(shape):
    """At every position of a prompt that spans blocks and segments, to 1e-4."""
    checkpoint = tiny_checkpoint(**shape)
    config = checkpoint.config
    token_ids = random_ids(300)
    cache_shape = (config.num_layers, 20, config.num_kv_heads, 16, config.head_dim)
    kv_cache = KvCache(torch.full(cache_shape, float("nan")), torch.full(cache_shape, float("nan")))
    ours = LlamaModel(HostWeights(checkpoint), 300).forward(one_row_inputs(token_ids, 16), kv_cache)
    with torch.no_grad():
        theirs = oracle(checkpoint)(torch.tensor([token_ids])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4


def test_greedy_tokens_equal_those_of_transformers():
    """Five prompts of different lengths in one batch, forty tokens each."""
    checkpoint = tiny_checkpoint(num_heads=9, num_kv_heads=3, seed=1)
    prompts = [random_ids(length, seed=length) for length in (1, 5, 16, 33, 70)]
    driver = Driver(CpuRunner(checkpoint, num_blocks=64, block_size=8, num_threads=1))
    ours = driver.run([driver.add(prompt, max_chunk=24) for prompt in prompts], 40)
    model = oracle(checkpoint)
    for prompt, output in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output == generated[0, len(prompt) :].tolist()
