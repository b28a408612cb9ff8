"""Log-probabilities of prompts through the core: whole, once, with the first token, whatever happens before it.

And two more fields that an executor acts on: a minimum of tokens, and rules that leave none; and tokens that are none.
"""

from dataclasses import replace

import pytest

from both_sides.audited import expected_logprobs, make_executor
from both_sides.harness import CoreHarness, running
from paceline.plan.values import LogprobColumns
from paceline_scheduler.core.events import StepFinished
from paceline_scheduler.errors import DivergenceError
from scheduler_rig.requests import column, make_request


def logprobs_of_prompt(request):
    """What the simulated model says of every prompt token but the first."""
    return tuple(expected_logprobs(request.prompt_token_ids[1:], request.num_prompt_logprobs))


@pytest.mark.parametrize("max_num_batched_tokens", [4, 9, 64])
def test_they_come_with_the_first_token_however_the_prompt_was_cut(max_num_batched_tokens):
    """In chunks of 4, in two, at once; also where the last chunk is a single token."""
    harness = CoreHarness(make_executor(max_num_batched_tokens=max_num_batched_tokens))
    request, other = make_request(17, 4, num_prompt_logprobs=2), make_request(6, 4)
    harness.submit(request, other)
    harness.finish()
    assert harness.client.prompt_logprobs == {request.handle: logprobs_of_prompt(request)}
    harness.assert_whole(request)


def test_no_step_computes_many_of_them():
    """A row of logits for each token is work that no prediction knows of: 64 tokens a step, however many would fit."""
    harness = CoreHarness(make_executor(max_num_batched_tokens=256, num_blocks=128))
    harness.submit(make_request(200, 2, num_prompt_logprobs=0), make_request(20, 2))
    assert harness.step().num_scheduled_tokens.tolist() == [64, 20]


def test_a_prompt_of_one_token_has_none():
    request = make_request(1, 2, num_prompt_logprobs=0)
    harness = running(request, steps=0)
    harness.finish()
    assert harness.client.prompt_logprobs == {}
    assert len(harness.client.token_ids[request.handle]) == 2


def test_a_cached_prefix_is_computed_again_for_them():
    harness = CoreHarness(make_executor())
    prompt = list(range(100, 117))
    requests = [make_request(prompt, 2), make_request(prompt, 2, num_prompt_logprobs=0), make_request(prompt, 2)]
    for request in requests:
        harness.submit(request)
        harness.finish()
    assert harness.client.prompt_logprobs == {requests[1].handle: logprobs_of_prompt(requests[1])}
    assert [harness.client.finishes[request.handle].num_cached_tokens for request in requests] == [0, 0, 16]


def test_a_stream_that_breaks_before_the_first_token_costs_none_of_them():
    request = make_request(14, 3, num_prompt_logprobs=1)
    harness = running(request, on=make_executor(max_num_batched_tokens=4))
    harness.run_ahead()
    harness.attach()
    harness.finish()
    assert harness.client.prompt_logprobs == {request.handle: logprobs_of_prompt(request)}
    harness.assert_whole(request)


def test_a_request_that_moves_after_its_first_token_is_not_asked_for_them_again():
    harness = CoreHarness(make_executor(), make_executor())
    request = make_request(9, 12, num_prompt_logprobs=1)
    harness.submit(request)
    address = next(address for address in harness.executors if harness.step(address) is not None)
    harness.step(address)
    harness.lose(address)
    other = next(name for name in harness.executors if name != address)
    plan = harness.step(other)
    assert [placement.num_prompt_logprobs for placement in plan.new_requests] == [None]
    harness.executors[address].restart()
    harness.finish()
    assert harness.client.prompt_logprobs == {request.handle: logprobs_of_prompt(request)}
    harness.assert_whole(request)


def test_ones_that_do_not_follow_are_a_divergence():
    request = make_request(10, 2, num_prompt_logprobs=0)
    harness = running(request, on=make_executor(max_num_batched_tokens=4), steps=0)
    harness.run_ahead()
    result = harness.results["executor-0"][0]
    (of_row,) = result.prompt_logprobs
    row, told = of_row.row, of_row.columns
    for wrong in (replace(told, offset=2), LogprobColumns(1, *(array.repeat(3, 0) for array in _arrays(told)))):
        with pytest.raises(DivergenceError, match="do not follow"):
            harness.feed(StepFinished("executor-0", replace(result, prompt_logprobs=(replace(of_row, columns=wrong),))))
    with pytest.raises(DivergenceError, match="of a row twice"):
        harness.feed(StepFinished("executor-0", replace(result, prompt_logprobs=(of_row, of_row))))
    assert harness.views.executor("executor-0").ledger.rows.num_computed[row] == 0
    assert column(row).tolist() == result.rows.tolist()
    harness.finish()
    assert harness.client.prompt_logprobs == {request.handle: logprobs_of_prompt(request)}


def _arrays(columns):
    return columns.logprobs, columns.top_token_ids, columns.top_logprobs


@pytest.mark.parametrize("min_tokens", [0, 3, 8])
def test_no_end_token_comes_before_the_minimum(min_tokens):
    request = make_request(5, 8, end_token_ids=(0,), min_tokens=min_tokens)
    harness = running(request, on=make_executor(end_probability=1.0), steps=0)
    harness.finish()
    output = harness.client.token_ids[request.handle]
    assert len(output) == min(min_tokens + 1, 8)
    assert output.count(0) == (min_tokens < 8)


@pytest.mark.parametrize("token_id", [-1, 32_000, 2**31 - 1])
def test_a_token_that_the_model_does_not_have_is_a_divergence(token_id):
    """Drawn or beside one that was drawn: nobody is told of it."""
    request = make_request(3, 2, num_logprobs=1)
    harness = running(request, steps=0)
    harness.run_ahead()
    result = harness.results["executor-0"][0]
    (of_row,) = result.logprobs
    top = replace(of_row.columns, top_token_ids=column(token_id)[:, None])
    for wrong in ({"token_ids": column(token_id)}, {"logprobs": (replace(of_row, columns=top),)}):
        with pytest.raises(DivergenceError, match="a token outside 0 to 31999"):
            harness.feed(StepFinished("executor-0", replace(result, **wrong)))
    harness.finish()
    harness.assert_whole(request)
