"""How plans, inputs, draws, advances of rows and results are launched: without drafts, and with the largest tables."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TypeVar

import torch

from kernel_resources.case import Case, meta
from paceline_kernels.clock import CLOCK_SIZE, stamp
from paceline_kernels.draws import (
    MAX_DRAFTS,
    MAX_END_TOKENS,
    Advanced,
    DrawInputs,
    RowDraws,
    advance_rows,
    draw_inputs,
)
from paceline_kernels.plan_ring import PlanRing, read_plan, write_words
from paceline_kernels.prompt_lookup import lookup_drafts
from paceline_kernels.result_ring import NUM_STAMPS, ResultRing, write_results
from paceline_kernels.sampling.columns import Samples, SamplingParameters
from paceline_kernels.step_inputs import MAX_PLANNED_ROWS, PlanColumns, RowBuffers, StepInputs, step_inputs

_Columns = TypeVar("_Columns", RowBuffers, RowDraws)
_ROWS, _MAX_TOKENS, _DRAWS, _LOGPROBS = 1024, 131_072, 2048, 20


def cases() -> Iterator[Case]:
    """A plan; many rows without drafts, and one with the largest table; results, with log-probabilities and without."""
    for num_planned in (1, 1024):
        yield Case(f"step inputs {num_planned}", partial(_call_step_inputs, num_planned))
    yield Case("plan", _call_plan)
    yield Case("draws 1024", partial(_call, 1024, 0, 2))
    yield Case("draws 1 drafts", partial(_call, 1, MAX_DRAFTS, MAX_END_TOKENS))
    for name, with_logprobs in (("results", False), ("results logprobs", True)):
        yield Case(name, partial(call_results, 256, with_logprobs=with_logprobs))


def _columns(kind: type[_Columns], usual: torch.Tensor, others: Mapping[str, torch.Tensor]) -> _Columns:
    """All columns are the usual one, but for the others."""
    return kind(**{field.name: others.get(field.name, usual) for field in dataclasses.fields(kind)})


def _state() -> RowBuffers:
    tokens, blocks = (meta(_ROWS, columns, dtype=torch.int32) for columns in (_MAX_TOKENS, 8192))
    return _columns(RowBuffers, meta(_ROWS, dtype=torch.int32), {"token_ids": tokens, "block_table": blocks})


def _call_step_inputs(num_planned: int) -> None:
    planned = meta(num_planned, dtype=torch.int32)
    step_inputs(_state(), PlanColumns(planned, planned), _DRAWS, 16)


def _call_plan() -> None:
    words, planned, changes = (meta(*shape, dtype=torch.int32) for shape in ((_ROWS * 100,), (4, _ROWS), (4, _DRAWS)))
    ring = PlanRing(meta(4, 2, dtype=torch.int32), planned, planned, changes, changes)
    read_plan(ring, meta(1, dtype=torch.int64), words, 256, meta(CLOCK_SIZE, dtype=torch.int64))
    write_words(words, meta(8, dtype=torch.int32), meta(8, dtype=torch.int32))
    stamp(meta(CLOCK_SIZE, dtype=torch.int64), 1)


def _call(num_planned: int, max_drafts: int, num_end_tokens: int) -> None:
    ints, floats = meta(_ROWS, dtype=torch.int32), meta(_ROWS, dtype=torch.float32)
    state = _state()
    ends, seeds = meta(_ROWS, num_end_tokens, dtype=torch.int32), meta(_ROWS, dtype=torch.int64)
    parameters = dict.fromkeys(("temperature", "top_p", "min_p"), floats)
    rows = _columns(RowDraws, ints, parameters | {"end_tokens": ends, "seeds": seeds})
    planned = meta(num_planned, dtype=torch.int32)
    plan = PlanColumns(planned, planned)
    tokens = meta(_DRAWS, dtype=torch.int32)
    batch = StepInputs(
        token_ids=tokens,
        positions=tokens,
        slot_mapping=meta(_DRAWS, dtype=torch.int64),
        cu_seqlens=meta(num_planned + 1, dtype=torch.int32),
        context_lens=planned,
        block_tables=meta(num_planned, 8192, dtype=torch.int32),
    )
    draws = draw_inputs(state, rows, plan, batch, _DRAWS, max_drafts)
    samples = Samples(tokens, tokens, meta(_DRAWS, dtype=torch.float32), tokens, tokens)
    advance_rows(state, rows, plan, batch, draws, samples, max_drafts)
    if max_drafts:
        lookup_drafts(state, rows, plan, max_drafts, meta(1, dtype=torch.float32))


def _samples(*slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens with their log-probabilities, and the likeliest ones with theirs."""
    ids, floats = torch.int32, torch.float32
    own, best = (*slots, _DRAWS), (*slots, _DRAWS, _LOGPROBS)
    return meta(*own, dtype=ids), meta(*own, dtype=floats), meta(*best, dtype=ids), meta(*best, dtype=floats)


def call_results(num_planned: int, *, with_logprobs: bool = False) -> None:
    """Write what a step of so many rows brought."""
    planned, tokens = meta(num_planned, dtype=torch.int32), meta(_DRAWS, dtype=torch.int32)
    steps, stamps = meta(4, dtype=torch.int64), meta(4, NUM_STAMPS, dtype=torch.int64)
    counts, codes = (meta(4, MAX_PLANNED_ROWS, dtype=dtype) for dtype in (torch.int32, torch.uint8))
    ring = ResultRing(steps, counts, counts, codes, codes, *_samples(4), stamps)
    draws = DrawInputs(tokens, meta(num_planned + 1, dtype=torch.int32), tokens, SamplingParameters(*[tokens] * 7))
    token_ids, *logprobs = _samples()
    samples = Samples(token_ids, tokens, *logprobs)
    advanced = Advanced(planned, meta(num_planned, dtype=torch.uint8))
    step, clock = meta(1, dtype=torch.int64), meta(CLOCK_SIZE, dtype=torch.int64)
    write_results(ring, step, advanced, draws, samples, clock, with_logprobs=with_logprobs)
