"""The Llama model against an independent implementation, transformers, on random weights."""

import pytest
import torch

from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.testing.driving import Driver
from paceline_executor.testing.models import tiny_checkpoint
from paceline_kernels.draws import RowDraws, RowFinish, advance_rows, draw_inputs
from paceline_kernels.sampling import SampleOutcome, sample
from paceline_kernels.step_inputs import PlanColumns, RowState, StepInputs, step_inputs

SHAPES = {
    "like the default model": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 16},
    "one KV head": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 12},
    "as many KV heads as heads": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 10, "num_layers": 3},
    "a head of its own": {"tie_word_embeddings": False},
}


def oracle(checkpoint):
    """transformers' Llama with the checkpoint's weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # which takes seconds

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


NUM_ROWS, MAX_TOKENS, BLOCK_SIZE = 5, 400, 16


def device_rows():
    """Rows as a device keeps them, with prompts of different lengths; the last has ended, after some tokens."""
    known = torch.tensor([300, 5, 40, 21, 33], dtype=torch.int32)
    ones = torch.ones(NUM_ROWS, dtype=torch.int32)
    state = RowState(
        token_ids=torch.tensor([random_ids(MAX_TOKENS, seed=row) for row in range(NUM_ROWS)], dtype=torch.int32),
        num_held=known.clone(),
        num_computed=torch.tensor([0, 0, 0, 0, 20], dtype=torch.int32),
        finish=torch.tensor([0, 0, 0, 0, RowFinish.LENGTH], dtype=torch.int32),
        block_table=torch.arange(NUM_ROWS * 25, dtype=torch.int32).view(NUM_ROWS, 25),
    )
    floats = torch.ones(NUM_ROWS)
    lengths = {"num_prompt": known.clone(), "num_known": known, "max_known": ones * MAX_TOKENS}
    draws = RowDraws(
        **lengths,
        end_tokens=-ones[:, None],
        temperature=floats,
        top_k=0 * ones,
        top_p=floats,
        min_p=0 * floats,
        seeds=torch.arange(NUM_ROWS),
        num_logprobs=-ones,
    )
    return state, draws


def run_steps(model, config, steps, padding):
    """The logits and tokens that each step draws from and draws, without those of padding, and the caches at the end.

    steps: of each (row, number of tokens), row by row, and how many draws. padding: how many rows that are none, tokens
    and draws there are more; without any, rows that have ended are left out, too.
    """
    shape = (config.num_layers, NUM_ROWS * 25, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    kv_cache = KvCache(torch.full(shape, float("nan")), torch.full(shape, float("nan")))
    state, rows = device_rows()
    outputs = []
    for step, num_draws in steps:
        going_on = [(row, num_tokens) for row, num_tokens in step if not state.finish[row]]
        planned = torch.tensor(step + [(-1, 0)] * padding if padding else going_on, dtype=torch.int32)
        plan = PlanColumns(*planned.T.contiguous())
        num_tokens = sum(num_tokens for _, num_tokens in going_on)
        batch = step_inputs(state, plan, num_tokens + padding, BLOCK_SIZE)
        draws = draw_inputs(state, rows, plan, batch, num_draws + padding)
        columns = {name: getattr(batch, name) for name in StepInputs.__dataclass_fields__}
        logits = model.forward(ForwardInputs(**columns, logit_tokens=draws.places), kv_cache)
        samples = sample(logits, draws.parameters)
        assert logits[num_draws:].isnan().all()
        assert (samples.outcomes[num_draws:] == SampleOutcome.NOT_FINITE).all()
        assert (samples.outcomes[:num_draws] == SampleOutcome.DRAWN).all()
        outputs.append((logits[:num_draws].clone(), samples.token_ids[:num_draws]))
        advance_rows(state, rows, plan, batch, draws, samples)
    return outputs, kv_cache


def test_padding_changes_no_bit():
    """Chunks, decodes of one segment and of several, a row that has ended: as without padding, in logits and caches."""
    checkpoint = tiny_checkpoint(num_heads=9, num_kv_heads=3)
    model = LlamaModel(HostWeights(checkpoint), MAX_TOKENS)
    steps = [
        ([(0, 290), (4, 3), (1, 5), (3, 4)], 1),
        ([(2, 40), (1, 1), (0, 10)], 3),
        ([(3, 17), (0, 1), (4, 1), (2, 1), (1, 1)], 4),
    ]
    expected, expected_cache = run_steps(model, checkpoint.config, steps, 0)
    found, cache = run_steps(model, checkpoint.config, steps, 9)
    for (logits, token_ids), (expected_logits, expected_ids) in zip(found, expected, strict=True):
        assert torch.equal(logits, expected_logits)
        assert torch.equal(token_ids, expected_ids)
    assert torch.equal(cache.keys.nan_to_num(7.0), expected_cache.keys.nan_to_num(7.0))
    assert torch.equal(cache.values.nan_to_num(7.0), expected_cache.values.nan_to_num(7.0))
