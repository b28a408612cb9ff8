"""draws: step by step, rows on a GPU become what the executor's own rows become of the same plans and tokens."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from paceline_executor.rows.columns import RowColumns
from paceline_executor.rows.limits import RowLimits
from paceline_executor.rows.plan import RowFinish as ExecutorsRowFinish
from paceline_executor.rows.plan import Sampling
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import RowProblem, StepOutput
from paceline_executor.testing.plans import int32, placement, plan
from paceline_kernels.draws import RowDraws, RowFinish
from paceline_kernels.draws import triton as kernels
from paceline_kernels.sampling import SampleOutcome, Samples
from paceline_kernels.step_inputs import PlanColumns, RowState, reference

LIMITS = RowLimits(num_rows=5, max_model_len=12, max_num_batched_tokens=64, num_blocks=20, block_size=4, vocab_size=9)
END = 8


def on_device(columns, place):
    """What a GPU keeps of the executor's rows: the same columns."""

    def put(array, dtype=torch.int32):
        return place(torch.from_numpy(np.array(array)).to(dtype))

    state = RowState(
        token_ids=put(columns.tokens),
        num_held=put(columns.num_known),
        num_computed=put(columns.num_computed),
        finish=put(columns.finish, torch.uint8),
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
        sampling=Sampling(row / 4, row, 0.5 + row / 10, row / 8, 2**63 + row),
    )


def placed(place, columns):
    """The same columns where kernels may use them."""
    return type(columns)(*(place(getattr(columns, field.name)) for field in dataclasses.fields(columns)))


def output_of(prepared, chance):
    """Random tokens, now and then none."""
    sampled = prepared.batch.sampled
    problems = {int(row): RowProblem.NOT_FINITE for row in sampled if chance.random() < 0.1}
    token_ids = int32([chance.choice([1, 2, 3, 4, 5, 6, 7, END]) for _ in sampled])
    return StepOutput(token_ids=token_ids, logprobs={}, problems=problems, forward_ns=0, sample_ns=0)


def assert_same_draws(draws, prepared):
    """The GPU draws from the tokens that the executor draws from, with the same parameters."""
    batch = prepared.batch
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


@pytest.mark.parametrize("seed", range(3))
def test_rows_on_a_gpu_advance_as_the_executors_do(place, seed):
    """Chunks, decodes, every way to end, and plans that still name rows that have ended."""
    chance = random.Random(seed)  # noqa: S311  # repeatable
    table = RowTable(LIMITS)
    placements = [random_placement(row, chance) for row in range(LIMITS.num_rows)]
    cells = [(row, index, 3 * row + index) for row in range(LIMITS.num_rows) for index in range(3)]
    table.apply(plan(place=placements, grants=cells), 0)
    columns: RowColumns = table._columns
    state, rows = on_device(columns, place)
    for _ in range(30):
        if columns.finish.all():
            break
        order = chance.sample(range(LIMITS.num_rows), k=chance.randint(1, LIMITS.num_rows))
        left = (columns.num_known - columns.num_computed).tolist()
        step = plan([(row, chance.randint(1, max(1, left[row]))) for row in order])
        applied, prepared = table.apply(step, 0), table.build_batch(step)
        output = output_of(prepared, chance)

        planned = PlanColumns(place(torch.from_numpy(step.rows)), place(torch.from_numpy(step.num_scheduled_tokens)))
        batch = placed(place, reference.step_inputs(state, planned, 24, LIMITS.block_size))
        draws = kernels.draw_inputs(state, rows, planned, batch, 6, 0)
        assert_same_draws(draws, prepared)
        token_ids, outcomes = torch.zeros(2, 6, dtype=torch.int32)
        token_ids[: len(output.token_ids)] = torch.from_numpy(output.token_ids)
        for index, row in enumerate(prepared.batch.sampled.tolist()):
            outcomes[index] = SampleOutcome.NOT_FINITE if row in output.problems else SampleOutcome.DRAWN
        samples = Samples(place(token_ids), place(outcomes), place(torch.zeros(6)), outcomes, outcomes)
        advanced = kernels.advance_rows(state, rows, planned, batch, draws, samples, 0)

        result = table.finish_step(step, applied, prepared, output)
        assert advanced.num_accepted.tolist() == result.num_accepted.tolist()
        assert advanced.finish.tolist() == result.finishes.tolist()
        assert_same_rows(state, rows, columns)
    assert columns.finish.all()


def test_reasons_to_end_have_the_executors_numbers():
    """So that they go into results as they are."""
    assert {finish.name: finish.value for finish in RowFinish} == {
        finish.name: finish.value for finish in ExecutorsRowFinish
    }
