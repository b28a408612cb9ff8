"""Padding of a batch, as captured graphs have it: rows, tokens and draws that are none change nothing of the others."""

import torch

from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.testing.models import tiny_checkpoint
from paceline_kernels.draws import RowDraws, RowFinish, advance_rows, draw_inputs
from paceline_kernels.sampling import SampleOutcome, sample
from paceline_kernels.step_inputs import PlanColumns, RowState, StepInputs, step_inputs

NUM_ROWS, MAX_TOKENS, BLOCK_SIZE = 5, 400, 16


def random_ids(length, vocab_size=512, seed=0):
    """Random token ids."""
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


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
