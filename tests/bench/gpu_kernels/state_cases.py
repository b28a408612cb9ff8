"""What a step does for rows beside its model: inputs, draws, verification of drafts, the advance of rows, results.

All of it is so little that only its time says something: 256 rows that go on, with and without drafts.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpu_kernels.case import Bound, Case, Place, Scale, Way, Work, mismatch_of, moved
from paceline_kernels.clock import new_clock
from paceline_kernels.draws import RowDraws
from paceline_kernels.draws import reference as draws_reference
from paceline_kernels.draws.triton import advance_rows, draw_inputs
from paceline_kernels.result_ring import new_ring
from paceline_kernels.result_ring import reference as ring_reference
from paceline_kernels.result_ring.triton import write_results
from paceline_kernels.sampling.columns import Samples
from paceline_kernels.step_inputs import PlanColumns, RowState, StepInputs
from paceline_kernels.step_inputs import reference as step_inputs_reference
from paceline_kernels.step_inputs.triton import step_inputs


@dataclass(frozen=True, slots=True)
class _Rows:
    """So many rows, each with so many known tokens and drafts behind them."""

    num_rows: int
    num_known: int
    num_drafts: int
    max_tokens: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Of a step: the last known one of each row, and its drafts."""
        return self.num_rows * (1 + self.num_drafts)


def cases(scale: Scale, place: Place) -> Iterator[Case]:
    """The operations, without drafts and with some."""
    if scale is Scale.ODD:
        yield from _of_rows(place, _Rows(3, 7, 2, 16, 4))
    if scale is Scale.FULL:
        yield from _of_rows(place, _Rows(256, 2048, 0, 131_072, 64))
        yield from _of_rows(place, _Rows(256, 2048, 4, 131_072, 64))


def _of_rows(place: Place, rows: _Rows) -> Iterator[Case]:
    builders = {
        "step inputs": _step_inputs,
        "draw inputs": _draw_inputs,
        "advance rows": _advance_rows,
        "write results": _write_results,
    }
    for op, build in builders.items():
        yield Case(
            op=op,
            shape={"rows": rows.num_rows, "drafts": rows.num_drafts},
            bound=Bound.LAUNCH,
            num_bytes=0,
            num_flops=0,
            build=_builder(build, place, rows),
            allowed_error=0.0,
        )


def _builder(build: Callable[[Place, _Rows, int], Work], place: Place, rows: _Rows) -> Callable[[int], Work]:
    return lambda seed: build(place, rows, seed)


def _step_inputs(place: Place, rows: _Rows, seed: int) -> Work:
    state, _, plan = _columns(rows, seed)
    state_there, plan_there = moved(state, place.device), moved(plan, place.device)

    def ours_of() -> StepInputs:
        return step_inputs(state_there, plan_there, rows.num_tokens, rows.block_size)

    def error(way: Way) -> float:
        ours, expected = way(ours_of), step_inputs_reference.step_inputs(state, plan, rows.num_tokens, rows.block_size)
        used = -(-int(expected.context_lens.max()) // rows.block_size)
        tables = (ours.block_tables[:, :used], expected.block_tables[:, :used])
        return _mismatch(ours, dataclasses.replace(expected, block_tables=ours.block_tables)) + mismatch_of(tables)

    return Work(ours_of, None, error)


def _draw_inputs(place: Place, rows: _Rows, seed: int) -> Work:
    columns = _columns(rows, seed)
    batch = step_inputs_reference.step_inputs(columns[0], columns[2], rows.num_tokens, rows.block_size)
    host = (*columns, batch, rows.num_tokens, rows.num_drafts)
    device = [moved(value, place.device) for value in host]

    def error(way: Way) -> float:
        return _mismatch(way(lambda: draw_inputs(*device)), draws_reference.draw_inputs(*host))

    return Work(lambda: draw_inputs(*device), None, error)


def _advance_rows(place: Place, rows: _Rows, seed: int) -> Work:
    """Replays go on with rows that have advanced, which changes no work."""
    host = _drawn(rows, seed)
    device = [moved(value, place.device) for value in host]

    def error(way: Way) -> float:
        ours = [moved(value, place.device) for value in host]
        expected = [moved(value, torch.device("cpu")) for value in host]
        wrong = _mismatch(way(lambda: advance_rows(*ours)), draws_reference.advance_rows(*expected))
        return wrong + _mismatch(ours[0], expected[0]) + _mismatch(ours[1], expected[1])

    return Work(lambda: advance_rows(*device), None, error)


def _write_results(place: Place, rows: _Rows, seed: int) -> Work:
    """Of the same step, into host memory; a replay writes the only slot again, as the next step."""
    step = _drawn(rows, seed)
    *_, drawn, samples, _ = step
    advanced = draws_reference.advance_rows(*step)
    host = (torch.zeros(1, dtype=torch.int64), advanced, drawn, samples, new_clock(torch.device("cpu")))
    device = [moved(value, place.device) for value in host]
    ours, expected = (
        new_ring(1, rows.num_rows, rows.num_tokens, pinned=is_ours and place.device.type == "cuda")
        for is_ours in (True, False)
    )
    ring_reference.write_results(expected, *host)

    def ours_of() -> None:
        write_results(ours, *device)

    def error(way: Way) -> float:
        way(ours_of)
        if place.device.type == "cuda":
            torch.cuda.synchronize()
        return _mismatch(ours, dataclasses.replace(expected, steps=device[0].cpu() - 1, stamps=ours.stamps))

    return Work(ours_of, None, error)


def _drawn(rows: _Rows, seed: int) -> tuple[Any, ...]:
    """What `advance_rows` is given, on the host. Every other draw equals its draft."""
    state, draws, plan = _columns(rows, seed)
    batch = step_inputs_reference.step_inputs(state, plan, rows.num_tokens, rows.block_size)
    drawn = draws_reference.draw_inputs(state, draws, plan, batch, rows.num_tokens, rows.num_drafts)
    tokens = torch.arange(rows.num_tokens, dtype=torch.int32) % 2
    nothing = torch.zeros(rows.num_tokens, 0)
    samples = Samples(tokens, torch.zeros_like(tokens), torch.zeros(rows.num_tokens), nothing.int(), nothing)
    return state, draws, plan, batch, drawn, samples, rows.num_drafts


def _columns(rows: _Rows, seed: int) -> tuple[RowState, RowDraws, PlanColumns]:
    """On the host: rows in any order, all of which go on, with drafts of ones."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_held = rows.num_rows, rows.num_known + rows.num_drafts
    ints = torch.ones(num_rows, dtype=torch.int32)
    max_blocks = rows.max_tokens // rows.block_size
    floats = torch.rand(num_rows, generator=generator)
    order = torch.randperm(num_rows, generator=generator).int()
    token_ids = torch.ones((num_rows, rows.max_tokens), dtype=torch.int32)
    token_ids[:, : rows.num_known].random_(2, 1000, generator=generator)
    state = RowState(
        token_ids=token_ids,
        num_held=ints * num_held,
        num_computed=ints * (rows.num_known - 1),
        finish=torch.zeros(num_rows, dtype=torch.int32),
        block_table=torch.randperm(num_rows * max_blocks, generator=generator).int().view(num_rows, max_blocks),
    )
    draws = RowDraws(
        num_prompt=ints,
        num_known=ints * rows.num_known,
        max_known=ints * rows.max_tokens,
        end_tokens=torch.full((num_rows, 3), -1, dtype=torch.int32),
        temperature=floats,
        top_k=ints * 50,
        top_p=floats,
        min_p=floats,
        seeds=torch.arange(num_rows),
        num_logprobs=-ints,
    )
    return state, draws, PlanColumns(order, ints * (1 + rows.num_drafts))


def _mismatch(ours: Any, expected: Any) -> float:  # noqa: ANN401  # columns of one kind
    """How many numbers of all columns differ."""
    if isinstance(expected, torch.Tensor):
        return mismatch_of((ours, expected))
    names = [field.name for field in dataclasses.fields(expected)]
    return sum(_mismatch(getattr(ours, name), getattr(expected, name)) for name in names)
