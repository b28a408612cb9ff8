"""Rules and log-probabilities of prompts on a model: the same wherever a row is placed, and what the softmax says."""

import numpy as np
import pytest
import torch

from executor_rig.cpu import cpu_runner
from executor_rig.plans import GREEDY, placement, plan
from executor_rig.stepping import SteppingEngine
from model_inputs import Row, inputs_of
from paceline.plan.sampling import SamplingParams
from paceline_executor.limits import RowLimits
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.device.host_model import HostModel
from paceline_executor.runner.interface import RowProblem
from paceline_executor.runner.prompt_logprobs import MAX_PIECE_TOKENS
from random_models import tiny_checkpoint

LIMITS = RowLimits(
    num_rows=4, max_model_len=256, max_num_batched_tokens=256, num_blocks=48, block_size=16, vocab_size=512
)
PROMPT = np.random.default_rng(5).integers(0, 512, 150).tolist()
DRAWING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}


@pytest.fixture(scope="module")
def runner():
    """A tiny float32 model."""
    return cpu_runner(tiny_checkpoint(num_heads=9, num_kv_heads=3), num_blocks=48, block_size=16)


def grants(row, num_blocks=12):
    """Blocks of a row's own."""
    return [(row, index, row * 12 + index) for index in range(num_blocks)]


def output_of(runner, *, output=(), num_tokens, sampling, **options):
    """What a row draws after a prompt of twelve tokens and this output."""
    engine = SteppingEngine(RowTable(LIMITS), runner)
    place = placement(0, PROMPT[:12], output=output, sampling=sampling, max_tokens=64, **options)
    engine.execute(plan([(0, 12 + len(output))], place=[place], grants=grants(0)))
    for step in range(2, num_tokens + 1):
        engine.execute(plan([(0, 1)], step_id=step))
    (state,) = engine.table.states()
    return state.output_token_ids.tolist()


def test_a_row_under_all_rules_goes_on_the_same_after_a_failover(runner):
    """Penalties, a bias, bad words of one and two tokens, a minimum: placed again with the output so far."""
    free = output_of(runner, num_tokens=20, sampling=SamplingParams(**DRAWING))
    rules = {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.4,
        "logit_bias": ((free[3], 3.0),),
    }
    options = {
        "sampling": SamplingParams(**DRAWING, **rules),
        "bad_words": [[free[1]], [free[5], free[6]]],
        "min_tokens": 10,
        "end_token_ids": [free[0]],
    }
    whole = output_of(runner, num_tokens=16, **options)
    assert whole != free[:16]
    assert free[0] not in whole[:10]
    for num_before in (1, 4, 11):
        again = output_of(runner, output=whole[:num_before], num_tokens=16 - num_before, **options)
        assert again == whole


def test_a_strong_bias_decides_a_greedy_draw(runner):
    biased = SamplingParams(**{**DRAWING, "temperature": 0.0}, logit_bias=((77, 100.0),))
    assert output_of(runner, num_tokens=3, sampling=biased) == [77, 77, 77]
    allowed = SamplingParams(**{**DRAWING, "temperature": 0.0}, allowed_token_ids=(5, 6), presence_penalty=2.0)
    assert set(output_of(runner, num_tokens=6, sampling=allowed)) <= {5, 6}


def run_prompt(runner, chunks, beside=(), num_prompt_logprobs=3):
    """Compute the prompt in these chunks, other rows beside the first; returns the results."""
    engine = SteppingEngine(RowTable(LIMITS), runner)
    asking = placement(0, PROMPT, num_prompt_logprobs=num_prompt_logprobs, sampling=GREEDY, num_logprobs=2)
    others = [placement(row, PROMPT[:size]) for row, size in beside]
    cells = [cell for row in range(1 + len(others)) for cell in grants(row)]
    scheduled = [(0, chunks[0]), *beside]
    results = [engine.execute(plan(scheduled, place=[asking, *others], grants=cells))]
    for step, size in enumerate(chunks[1:], start=2):
        results.append(engine.execute(plan([(0, size)], step_id=step)))
    return results


@pytest.mark.parametrize("chunks", [(150,), (70, 50, 30), (1, 148, 1), (149, 1), (64, 64, 22)])
def test_prompt_logprobs_are_those_of_the_models_logits_over_chunk_borders(runner, chunks):
    """A float64 log-softmax of the logits of one pass over the whole prompt; the first output token as without."""
    results = run_prompt(runner, chunks)
    told = [logprobs for result in results for logprobs in result.prompt_logprobs]
    assert told[0].columns.offset == 1
    ours = np.concatenate([item.columns.logprobs for item in told])
    best = np.concatenate([item.columns.top_logprobs for item in told])
    expected = torch.log_softmax(whole_logits(runner).double(), dim=-1)[:-1]
    of_tokens = expected[range(149), torch.tensor(PROMPT[1:])]
    assert np.concatenate([item.token_ids for item in told]).tolist() == PROMPT[1:]
    np.testing.assert_allclose(ours, of_tokens.numpy(), rtol=0, atol=3e-6)
    np.testing.assert_allclose(best, expected.topk(3).values.numpy(), rtol=0, atol=3e-6)
    assert results[-1].token_ids.tolist() == [int(whole_logits(runner)[-1].argmax())]


def whole_logits(runner):
    """The logits of every prompt token, of one forward pass. [150, vocab]."""
    inputs = inputs_of(Row(PROMPT, range(12)), block_size=16)
    return runner._device.run(lambda: runner._model.hidden(inputs, runner._kv_cache).clone())


def told(result):
    """The log-probabilities of a result, token by token."""
    return [(each.row, each.columns.of(0, each.token_ids)) for each in result.logprobs]


def test_rows_beside_one_that_wants_prompt_logprobs_draw_as_ever(runner):
    alone = run_prompt(runner, (150,), num_prompt_logprobs=None, beside=[(1, 20), (2, 5)])
    beside = run_prompt(runner, (150,), beside=[(1, 20), (2, 5)])
    assert beside[0].token_ids.tolist() == alone[0].token_ids.tolist()
    assert told(beside[0]) == told(alone[0])
    assert alone[0].prompt_logprobs == ()


def test_logits_of_a_prompt_are_computed_a_piece_at_a_time(runner, monkeypatch):
    """Then the rest of the batch: its last token, and the row beside it."""
    sizes, hidden = [], HostModel.hidden

    def hidden_and_note(self, inputs, *more):
        sizes.append((inputs.token_ids.shape[0], inputs.logit_tokens.shape[0]))
        return hidden(self, inputs, *more)

    monkeypatch.setattr(HostModel, "hidden", hidden_and_note)
    run_prompt(runner, (150,), beside=[(1, 5)])
    assert sizes == [(MAX_PIECE_TOKENS, MAX_PIECE_TOKENS)] * 2 + [(21, 21), (5 + 1, 2)]


def test_a_prompt_with_logits_that_are_no_numbers_fails_its_row_alone(runner):
    table = RowTable(LIMITS)
    engine = SteppingEngine(table, runner)
    place = [placement(0, PROMPT, num_prompt_logprobs=0), placement(1, PROMPT[:5])]
    engine.execute(plan([(0, 20)], place=place, grants=[*grants(0), *grants(1)]))
    keys = runner._kv_cache.keys[0, 0].clone()
    runner._kv_cache.keys[0, 0].fill_(float("nan"))
    second = plan([(0, 30), (1, 5)], step_id=2)
    output = runner.wait(runner.launch(table.launch(second, now_ns=0).prepared.batch))
    runner._kv_cache.keys[0, 0].copy_(keys)
    assert output.problems == {0: RowProblem.NOT_FINITE}
    assert output.prompt_logprobs == {}
