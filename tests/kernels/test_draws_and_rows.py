"""draws: step by step, rows on a device become what the executor's own rows become of the same plans and tokens.

And of the same rules, which change the same logits, whatever is drafted.
"""

import dataclasses
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_rig.plans import int32, placement, plan
from kernel_rig.tensors import placed
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import RowFinish
from paceline_executor.limits import RowLimits
from paceline_executor.rows.columns import RowArrays
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.drafter import NoDrafter, TimedDrafter
from paceline_executor.runner.host_rows import HostRows
from paceline_executor.runner.interface import RowProblem, StepOutput
from paceline_kernels.draws import FinishCode, RowDraws, advance_rows, draw_inputs
from paceline_kernels.gpu import architecture
from paceline_kernels.sampling import (
    DrawRules,
    LogitRules,
    RuleTable,
    SampleOutcome,
    Samples,
    SamplingParameters,
    TokenLists,
    sample,
)
from paceline_kernels.sampling import reference as sampling_reference
from paceline_kernels.sampling.draw_rules import rules_of_draws
from paceline_kernels.step_inputs import PlanColumns, RowBuffers, reference, step_inputs

LIMITS = RowLimits(num_rows=5, max_model_len=12, max_num_batched_tokens=64, num_blocks=20, block_size=4, vocab_size=9)
END = 8
NO_OUTPUT = StepOutput(int32([]), int32([]), None, {}, forward_ns=0, sample_ns=0)


def on_device(columns, place):
    """What a GPU keeps of the executor's rows: the same columns."""

    def put(array, dtype=torch.int32):
        return place(torch.from_numpy(np.array(array)).to(dtype))

    state = RowBuffers(
        token_ids=put(columns.tokens),
        num_held=put(columns.num_known),
        num_computed=put(columns.num_computed),
        finish=put(columns.finish),
        block_table=put(columns.block_table),
    )
    rows = RowDraws(
        num_prompt=put(columns.num_prompt),
        num_known=put(columns.num_known),
        max_known=put(columns.max_known),
        end_tokens=put(columns.end_tokens[:, : columns.max_end_tokens]),
        temperature=put(columns.temperature, torch.float32),
        top_k=put(columns.top_k),
        top_p=put(columns.top_p, torch.float32),
        min_p=put(columns.min_p, torch.float32),
        seeds=put(columns.seed.view(np.int64), torch.int64),
        num_logprobs=put(columns.num_logprobs),
    )
    return state, rows


def random_placement(row, chance):
    """A request with parameters of its own."""
    return placement(
        row,
        chance.choices(range(8), k=chance.randint(1, 9)),
        max_tokens=chance.randint(1, 9),
        end_token_ids=[END, 7][: row % 3],
        sampling=SamplingParams(row / 4, row, 0.5 + row / 10, row / 8, 2**63 + row),
    )


def host_rows():
    """Of a runner that computes on its host."""
    return HostRows(LIMITS.block_size, LIMITS.vocab_size, TimedDrafter(NoDrafter(), lambda: 0))


def drawn_output(batch, token_ids, problems):
    """The tokens of the rows without problems."""
    is_drawn = ~np.isin(batch.sampled, list(problems))
    return StepOutput(is_drawn.astype(np.int32), token_ids[is_drawn], None, problems, forward_ns=0, sample_ns=0)


def output_of(batch, chance):
    """Random tokens, now and then none."""
    sampled = batch.sampled
    problems = {int(row): RowProblem.NOT_FINITE for row in sampled if chance.random() < 0.1}
    token_ids = int32([chance.choice([1, 2, 3, 4, 5, 6, 7, END]) for _ in sampled])
    return drawn_output(batch, token_ids, problems)


def assert_same_draws(draws, batch):
    """The GPU draws from the tokens that a host draws from, with the same parameters."""
    num_sampled = len(batch.sampled)
    assert draws.places[:num_sampled].tolist() == (batch.cu_seqlens[batch.sampled + 1] - 1).tolist()
    for name in ("temperature", "top_k", "top_p", "min_p", "offsets", "num_logprobs"):
        ours, theirs = getattr(draws.parameters, name), getattr(batch.sampling, name)
        assert ours[:num_sampled].tolist() == theirs.tolist(), name
    assert draws.parameters.seeds[:num_sampled].tolist() == batch.sampling.seeds.view(np.int64).tolist()


def assert_same_rows(state, rows, columns):
    """Whatever a step changes."""
    for ours, theirs in (
        (state.num_held, columns.num_known),
        (rows.num_known, columns.num_known),
        (state.num_computed, columns.num_computed),
        (state.finish, columns.finish),
        (state.token_ids, columns.tokens),
    ):
        assert ours.cpu().tolist() == theirs.tolist()


SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])


@SEEDS
def test_rows_on_a_device_advance_as_the_executors_do(place, seed):
    chance = random.Random(seed)  # noqa: S311  # repeatable
    table, host = RowTable(LIMITS), host_rows()
    placements = [random_placement(row, chance) for row in range(LIMITS.num_rows)]
    cells = [(row, index, 3 * row + index) for row in range(LIMITS.num_rows) for index in range(3)]
    placing = plan(place=placements, grants=cells)
    table.land(table.launch(placing, 0), NO_OUTPUT)
    columns: RowArrays = table._columns
    state, rows = on_device(columns, place)
    for _ in range(30):
        if columns.finish.all():
            break
        order = chance.sample(range(LIMITS.num_rows), k=chance.randint(1, LIMITS.num_rows))
        left = (columns.num_known - columns.num_computed).tolist()
        step = plan([(row, chance.randint(1, max(1, left[row]))) for row in order])
        launched = table.launch(step, 0)
        batches = []

        def compute(batch, batches=batches):
            batches.append(batch)
            return output_of(batch, chance)

        output = host.step(launched.prepared.batch, compute)

        planned = PlanColumns(place(torch.from_numpy(step.rows)), place(torch.from_numpy(step.num_scheduled_tokens)))
        batch = placed(place, reference.step_inputs(state, planned, 24, LIMITS.block_size))
        draws = draw_inputs(state, rows, planned, batch, 6, 0)
        for computed in batches:  # none where all rows have ended
            assert_same_draws(draws, computed)
        token_ids, outcomes = torch.zeros(2, 6, dtype=torch.int32)
        drawn = np.flatnonzero(output.num_accepted)
        token_ids[drawn] = torch.from_numpy(output.token_ids)
        for index, row in enumerate(launched.prepared.batch.sampled.tolist()):
            outcomes[index] = SampleOutcome.NOT_FINITE if row in output.problems else SampleOutcome.DRAWN
        samples = Samples(place(token_ids), place(outcomes), place(torch.zeros(6)), outcomes, outcomes)
        advanced = advance_rows(state, rows, planned, batch, draws, samples, 0)

        result = table.land(launched, output)
        assert advanced.num_accepted.tolist() == result.num_accepted.tolist()
        assert advanced.finish.tolist() == result.finishes.tolist()
        assert_same_rows(state, rows, columns)
    assert columns.finish.all()


def test_reasons_to_end_have_the_executors_numbers():
    """So that they go into results as they are."""
    assert {finish.name: finish.value for finish in FinishCode} == {finish.name: finish.value for finish in RowFinish}


def rules_on_device(placements):
    """What a GPU keeps of the rules of requests, row by row."""

    def column(values, dtype=torch.float32):
        return torch.tensor(list(values), dtype=dtype)

    def ends(lists):
        return column(np.cumsum([0, *map(len, lists)]), torch.int32)

    def lists(tokens):
        return TokenLists(ends(tokens), column((token for mine in tokens for token in mine), torch.int32))

    chosen = [placement.sampling for placement in placements]
    return RuleTable(
        allowed=lists([sampling.allowed_token_ids for sampling in chosen]),
        biased=lists([[token for token, _ in sampling.logit_bias] for sampling in chosen]),
        biases=column(bias for sampling in chosen for _, bias in sampling.logit_bias),
        presence_penalty=column(sampling.presence_penalty for sampling in chosen),
        frequency_penalty=column(sampling.frequency_penalty for sampling in chosen),
        repetition_penalty=column(sampling.repetition_penalty for sampling in chosen),
        min_tokens=column((placement.min_tokens for placement in placements), torch.int32),
        withheld=lists([placement.end_token_ids + placement.ignored_end_token_ids for placement in placements]),
        words=lists([word for placement in placements for word in placement.bad_word_token_ids]),
        cu_words=ends([placement.bad_word_token_ids for placement in placements]),
    )


def random_request(chance):
    """One with rules, or without; of a few tokens, so that words are said and penalties count."""
    tokens = range(LIMITS.vocab_size)
    biased = chance.sample(tokens, k=chance.randint(0, 3))
    return placement(
        0,
        chance.choices(tokens, k=chance.randint(1, 4)),
        max_tokens=chance.randint(3, 9),
        end_token_ids=[END, 7][: chance.randint(1, 2)],
        ignored_end_token_ids=[6][: chance.randint(0, 1)],
        min_tokens=chance.randint(0, 5),
        bad_words=[chance.choices(range(4), k=chance.randint(1, 3)) for _ in range(chance.randint(0, 4))],
        sampling=SamplingParams(
            temperature=chance.choice([0.0, 1.0]),
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=chance.randint(0, 2**64 - 1),
            presence_penalty=chance.choice([0.0, 1.5]),
            frequency_penalty=chance.choice([0.0, -0.5, 1.0]),
            repetition_penalty=chance.choice([1.0, 1.0, 1.7]),
            logit_bias=tuple((token, chance.choice([-2.0, 3.0])) for token in biased),
            allowed_token_ids=chance.choice([(), (), (0, 1, 2, 8), (3,)]),
        ),
    )


def columns_of(request):
    """The executor's table with one request, and its columns."""
    table = RowTable(LIMITS)
    placing = plan(place=[request], grants=[(0, index, index) for index in range(3)])
    table.land(table.launch(placing, 0), NO_OUTPUT)
    return table, table._columns


def model(tokens):
    """Logits after these tokens: few numbers, so that the next one is often one of the last."""
    return torch.from_numpy(np.random.default_rng(list(tokens)[-2:]).normal(size=LIMITS.vocab_size)).float()


def tensors(kind, columns):
    """The executor's columns as the kernels' of the same names."""

    def tensor(value):
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value.view(np.int64) if value.dtype == np.uint64 else value)
        return tensors(TokenLists, value)

    return kind(*(tensor(getattr(columns, field.name)) for field in dataclasses.fields(kind)))


def decoded_one_by_one(request):
    """A request's tokens as the executor draws them, and why it ended."""
    (table, columns), host = columns_of(request), host_rows()

    def compute(batch):
        rules = None if batch.sampling.rules is None else tensors(LogitRules, batch.sampling.rules)
        logits = model(columns.tokens[0, : columns.num_known[0]])[None]
        drawn = sampling_reference.sample(logits, tensors(SamplingParameters, batch.sampling), rules)
        problems = {} if drawn.outcomes[0] == SampleOutcome.DRAWN else {0: RowProblem.NOTHING_LEFT}
        return drawn_output(batch, drawn.token_ids.numpy(), problems)

    while not columns.finish[0]:
        launched = table.launch(plan([(0, int(columns.num_known[0] - columns.num_computed[0]))]), 0)
        table.land(launched, host.step(launched.prepared.batch, compute))
    return columns.tokens[0, : columns.num_known[0]].tolist(), columns.finish[0]


@settings(max_examples=settings.default.max_examples // 4)
@given(chance=st.randoms())
def test_drafts_change_no_token_of_a_row_with_rules(chance):
    """Whatever is drafted, right or wrong: rules see the tokens before each draw, and nothing behind it. By a CPU."""
    request = random_request(chance)
    expected, finish = decoded_one_by_one(request)
    state, rows = on_device(columns_of(request)[1], torch.clone)
    rules, planned = rules_on_device([request] * LIMITS.num_rows), PlanColumns(*torch.tensor([[0], [6]]).int())
    while not state.finish[0]:
        known = int(rows.num_known[0])
        drafts = expected[known : known + chance.randint(0, 4)] + chance.choices(range(9), k=chance.randint(0, 2))
        drafts = torch.tensor(drafts[: LIMITS.max_model_len - known], dtype=torch.int32)
        state.token_ids[0, known : known + len(drafts)] = drafts
        state.num_held[0] = known + len(drafts)
        batch = step_inputs(state, planned, 6, LIMITS.block_size)
        draws = draw_inputs(state, rows, planned, batch, 6, 5)
        ends = [int(batch.positions[place]) + 1 for place in draws.places]  # those of padding are anything
        logits = torch.stack([model(state.token_ids[0, :end].tolist()) for end in ends])
        rules_here = DrawRules(rules, draws.rows, state.token_ids, rows.num_prompt)
        samples = sample(logits, draws.parameters, rules_here)
        advance_rows(state, rows, planned, batch, draws, samples, 5)
    assert state.token_ids[0, : rows.num_known[0]].tolist() == expected
    assert state.finish[0] == finish


@SEEDS
def test_rules_of_draws_change_what_the_reference_changes(backend, place, monkeypatch, seed):
    """To the bit: draws of rows in any order, behind any tokens; padding has no rules."""
    chance = random.Random(seed)  # noqa: S311  # repeatable
    requests = [random_request(chance) for _ in range(5)]
    rows = torch.tensor([-1, *chance.choices(range(5), k=7)], dtype=torch.int32)
    offsets = torch.tensor([0, *(chance.randint(0, 8) for _ in rows[1:])], dtype=torch.int32)
    token_ids = torch.tensor([chance.choices(range(5), k=12) for _ in requests], dtype=torch.int32)
    num_prompt = torch.tensor([len(request.prompt_token_ids) for request in requests], dtype=torch.int32)
    rules = DrawRules(rules_on_device(requests), rows, token_ids, num_prompt)
    logits = torch.stack([model([seed, draw]) for draw in range(len(rows))])
    lists = sampling_reference.rules_of_draws(rules, offsets)
    expected = [sampling_reference.ruled(row.numpy(), lists, draw).tolist() for draw, row in enumerate(logits)]
    if not backend.is_gpu:
        cpus = rules_of_draws(rules, offsets)
        assert [
            sampling_reference.ruled(row.numpy(), cpus, draw).tolist() for draw, row in enumerate(logits)
        ] == expected
        return
    from paceline_kernels.sampling import triton as kernels

    here = architecture.current()
    launch = dataclasses.replace(kernels.LAUNCHES[here], rule_block=4)  # loops go round
    monkeypatch.setitem(kernels.LAUNCHES, here, launch)
    ruled, is_ruled = kernels._apply(placed(place, rules), None, place(offsets), kernels._rows("sample", place(logits)))
    assert torch.where(is_ruled.cpu()[:, None] != 0, ruled.cpu(), logits).tolist() == expected
    assert not is_ruled[0]


def test_draws_without_rules_have_none():
    """Nor does padding, whatever the first row has: nothing is copied for them."""
    withheld_only = placement(
        0, [1], max_tokens=3, end_token_ids=[END], min_tokens=2, sampling=SamplingParams(0, 0, 1, 0, 0)
    )
    plain = placement(0, [1], max_tokens=3, end_token_ids=[END], sampling=SamplingParams(0, 0, 1, 0, 0))
    kept = rules_on_device([withheld_only, plain])
    token_ids, num_prompt = torch.zeros(2, 5, dtype=torch.int32), torch.ones(2, dtype=torch.int32)

    def lists_of(rows, offsets):
        draws = DrawRules(kept, torch.from_numpy(int32(rows)), token_ids, num_prompt)
        return rules_of_draws(draws, torch.from_numpy(int32(offsets)))

    assert lists_of([1, -1, 0], [0, 0, 2]) is None
    assert lists_of([1, 0], [0, 1]).forbidden.cu_lens.tolist() == [0, 0, 1]
