"""Rules of rows: what is masked and penalised at a token follows from prompt and output alone."""

import numpy as np
import pytest

from executor_rig.hash_runner import HashRunner
from executor_rig.plans import int32, placement, plan
from executor_rig.stepping import SteppingEngine
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import RowFinish
from paceline_executor.errors import NoTokenLeftError
from paceline_executor.limits import RowLimits
from paceline_executor.rows.rules import rules_of
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.drafter import NoDrafter, TimedDrafter
from paceline_executor.runner.host_rows import HostRows
from paceline_executor.runner.interface import StepOutput

pytestmark = pytest.mark.usefixtures("seen_or_hidden")

LIMITS = RowLimits(
    num_rows=4, max_model_len=32, max_num_batched_tokens=40, num_blocks=24, block_size=4, vocab_size=1000
)


def sampling(**rules):
    """Greedy, with rules."""
    return SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, **rules)


def run(*placements, num_tokens=8):
    """Place requests on rows, decode together; returns the outputs by row and all results."""
    engine = SteppingEngine(RowTable(LIMITS), HashRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size))
    sizes = [place.prompt_token_ids.size + place.output_token_ids.size for place in placements]
    grants = [(place.row, index, place.row * 6 + index) for place in placements for index in range(6)]
    scheduled = [(place.row, size) for place, size in zip(placements, sizes, strict=True)]
    results = [engine.execute(plan(scheduled, place=placements, grants=grants))]
    while len(results) < num_tokens:
        again = [(place.row, 1) for place in placements]
        results.append(engine.execute(plan(again, step_id=len(results) + 1)))
    states = {state.row: state.output_token_ids.tolist() for state in engine.table.states()}
    return states, results


def forbidden(request, output):
    """What cannot follow this output, sorted."""
    return sorted(rules_of(request).forbidden_after(int32(output)).tolist())


def test_a_request_without_rules_has_none():
    assert rules_of(placement(0, [1], end_token_ids=[2])) is None


def test_end_tokens_are_masked_until_the_minimum():
    request = placement(0, [1], min_tokens=2, end_token_ids=[5, 6], ignored_end_token_ids=[9])
    assert forbidden(request, []) == forbidden(request, [3]) == [5, 6, 9]
    assert forbidden(request, [3, 4]) == []


def test_the_last_token_of_a_bad_word_is_masked_behind_those_before_it():
    request = placement(0, [7, 8], bad_words=[[4], [7, 8, 9], [8, 5], [1, 2, 3]])
    assert forbidden(request, []) == [4]  # the prompt does not count
    assert forbidden(request, [8]) == [4, 5]
    assert forbidden(request, [7, 8]) == [4, 5, 9]
    assert forbidden(request, [7, 8, 1]) == [4]
    assert forbidden(request, [0, 1, 2]) == [3, 4]


def test_bad_words_that_differ_in_their_last_token_are_all_masked():
    """However many there are, and whatever longer ones end in the same tokens."""
    request = placement(0, [7], bad_words=[*([7, last] for last in range(100, 612)), [6, 7, 5], [9, 7, 4]])
    assert forbidden(request, [6]) == []
    assert forbidden(request, [7]) == [*range(100, 612)]
    assert forbidden(request, [6, 7]) == [5, *range(100, 612)]


def test_a_row_ends_at_the_first_end_token_after_the_minimum():
    """The free draw would end at once; masked, the neighbour is taken instead."""
    free, _ = run(placement(0, [1, 2, 3]), num_tokens=1)
    end = free[0][0]
    ended, results = run(placement(0, [1, 2, 3], end_token_ids=[end]), num_tokens=1)
    assert (ended[0], results[0].finishes[0]) == ([end], RowFinish.END_TOKEN)
    late, results = run(placement(0, [1, 2, 3], end_token_ids=[end], min_tokens=1), num_tokens=1)
    assert (late[0], results[0].finishes[0]) == ([end + 1], RowFinish.GOES_ON)


def test_rows_with_rules_leave_their_neighbours_alone():
    alone, _ = run(placement(1, [4, 5]))
    together, _ = run(
        placement(0, [1, 2], sampling=sampling(allowed_token_ids=(10, 20, 30))),
        placement(1, [4, 5]),
        placement(2, [1, 2], bad_words=[[token] for token in alone[1]]),
    )
    assert set(together[0]) <= {10, 20, 30}
    assert together[1] == alone[1]
    assert not set(together[2]) & set(alone[1])


def test_a_row_whose_rules_leave_nothing_fails_alone():
    impossible = placement(0, [1, 2], sampling=sampling(allowed_token_ids=(7,)), bad_words=[[7]])
    outputs, results = run(impossible, placement(1, [4, 5]), num_tokens=2)
    (error,) = results[0].errors
    assert (error.row, error.reason) == (0, NoTokenLeftError.reason)
    assert results[0].finishes.tolist() == [RowFinish.ERROR, RowFinish.GOES_ON]
    assert ([*outputs[0]], len(outputs[1])) == ([], 2)


@pytest.mark.parametrize("num_before", [1, 2, 5, 7])
def test_a_row_that_is_placed_again_with_its_output_goes_on_the_same(num_before):
    free, _ = run(placement(0, [1, 2, 3]))
    words = [[free[0][1]], [free[0][0], free[0][0] + 1], [free[0][2], free[0][3]]]
    options = {"bad_words": words, "min_tokens": 6, "end_token_ids": [free[0][4]]}
    whole, _ = run(placement(0, [1, 2, 3], **options))
    again, _ = run(placement(0, [1, 2, 3], output=whole[0][:num_before], **options), num_tokens=8 - num_before)
    assert again == whole


def sampling_of(*plans):
    """How the draws of these steps are sampled, by a runner that draws the same token always."""
    drafter = TimedDrafter(NoDrafter(), lambda: 0)
    table, rows, seen = RowTable(LIMITS), HostRows(LIMITS.block_size, LIMITS.vocab_size, drafter), []

    def compute(batch):
        seen.append(batch.sampling)
        ones = np.ones(batch.sampled.size, dtype=np.int32)
        return StepOutput(ones, ones, None, {}, forward_ns=0, sample_ns=0)

    for step in plans:
        launched = table.launch(step, now_ns=0)
        table.land(launched, rows.step(launched.prepared.batch, compute))
    return seen


def test_a_row_without_rules_costs_nothing_and_one_past_its_minimum_neither():
    places = [placement(0, [1, 2]), placement(1, [3], output=[4], min_tokens=2, end_token_ids=[9])]
    first = plan([(0, 2), (1, 2)], place=places, grants=[(0, 0, 0), (1, 0, 1)])
    before, behind = sampling_of(first, plan([(0, 1), (1, 1)], step_id=2))
    assert before.rules.forbidden.cu_lens.tolist() == [0, 0, 1]
    assert behind.rules is None


def test_penalised_rows_bring_prompt_and_output_as_far_as_they_count():
    places = [
        placement(0, [2, 1, 2], output=[3], sampling=sampling(repetition_penalty=1.5)),
        placement(1, [4], output=[5, 5], sampling=sampling(frequency_penalty=0.5)),
    ]
    first = plan([(0, 4), (1, 3)], place=places, grants=[(0, 0, 0), (1, 0, 1)])
    (sampled,) = sampling_of(first)
    rules = sampled.rules
    assert (rules.prompt.cu_lens.tolist(), rules.prompt.token_ids.tolist()) == ([0, 2, 2], [1, 2])
    assert (rules.output.cu_lens.tolist(), rules.output.token_ids.tolist()) == ([0, 1, 3], [3, 5, 5])
    assert rules.repetition_penalty.tolist() == [1.5, 1.0]
    assert np.array_equal(rules.frequency_penalty, np.array([0, 0.5], dtype=np.float32))


def test_prompt_logprobs_are_told_chunk_by_chunk_of_tokens_that_have_others_before_them():
    engine = SteppingEngine(RowTable(LIMITS), HashRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size))
    place = placement(0, list(range(10, 19)), num_prompt_logprobs=1)
    grants = [(0, index, index) for index in range(3)]
    results = [engine.execute(plan([(0, 4)], place=[place, placement(1, [5])], grants=grants))]
    results += [engine.execute(plan([(0, size)], step_id=step)) for step, size in ((2, 4), (3, 1), (4, 1))]
    told = [[(t.row, t.columns.offset, t.token_ids.tolist()) for t in result.prompt_logprobs] for result in results]
    assert told == [[(0, 1, [11, 12, 13, 14])], [(0, 5, [15, 16, 17, 18])], [], []]
    assert results[0].prompt_logprobs[0].columns.top_logprobs.shape == (4, 1)
    assert results[2].num_accepted.tolist() == [1]
