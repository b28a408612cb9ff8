"""From the step loop's arrays to the model's and the sampler's tensors, and from outcomes to problems of rows."""

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline_executor.models.interface import ForwardInputs
from paceline_executor.runner.interface import (
    FlatBatch,
    Float32Array,
    Int32Array,
    LogitRuleColumns,
    RowProblem,
    SamplingColumns,
    TokenLists,
)
from paceline_kernels import sampling
from paceline_kernels.sampling import LogitRules, SampleOutcome, SamplingParameters


def forward_inputs(batch: FlatBatch, block_size: int, logit_tokens: Int32Array) -> ForwardInputs:
    """CPU tensors, with the slot of every token. logit_tokens: places in the batch of wanted logits. Raises IndexError
    for a position outside of its row's block table.
    """
    slots = slots_of(batch.positions, batch.cu_seqlens, batch.block_tables, block_size)
    return ForwardInputs(
        token_ids=_tensor(batch.token_ids, np.int32),
        positions=_tensor(batch.positions, np.int32),
        slot_mapping=_tensor(slots, np.int64),
        cu_seqlens=_tensor(batch.cu_seqlens, np.int32),
        context_lens=_tensor(batch.context_lens, np.int32),
        block_tables=_tensor(batch.block_tables, np.int32),
        logit_tokens=_tensor(logit_tokens, np.int32),
    )


def slots_of(
    positions: Int32Array, cu_seqlens: Int32Array, block_tables: Int32Array, block_size: int
) -> npt.NDArray[np.int64]:
    """Where the tokens of a flat batch lie, [num_tokens]. Raises IndexError."""
    rows = np.repeat(np.arange(cu_seqlens.size - 1), np.diff(cu_seqlens))
    blocks = block_tables[rows, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


def sampling_parameters(columns: SamplingColumns) -> SamplingParameters:
    return SamplingParameters(
        temperature=_tensor(columns.temperature, np.float32),
        top_k=_tensor(columns.top_k, np.int32),
        top_p=_tensor(columns.top_p, np.float32),
        min_p=_tensor(columns.min_p, np.float32),
        seeds=_tensor(columns.seeds, np.uint64).view(torch.int64),
        offsets=_tensor(columns.offsets, np.int32),
        num_logprobs=_tensor(columns.num_logprobs, np.int32),
    )


def row_problem(outcome: int) -> RowProblem:
    """`outcome` is a SampleOutcome other than DRAWN."""
    return RowProblem[SampleOutcome(outcome).name]


def logit_rules(columns: LogitRuleColumns) -> LogitRules:
    tensors: dict[str, Any] = {name: _rule(getattr(columns, name)) for name in _RULES}
    return LogitRules(**tensors)


def _rule(column: TokenLists | Float32Array) -> sampling.TokenLists | torch.Tensor:
    if isinstance(column, TokenLists):
        return sampling.TokenLists(_tensor(column.cu_lens, np.int32), _tensor(column.token_ids, np.int32))
    return _tensor(column, np.float32)


_RULES = tuple(field.name for field in fields(LogitRules))  # LogitRuleColumns has the same


def _tensor(values: npt.NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
    """Over the array, or over a copy where its type or layout does not fit."""
    if not (values.dtype == dtype and values.flags.c_contiguous and values.flags.writeable):
        values = np.array(values, dtype=dtype, order="C")
    return torch.from_numpy(values)
