"""From the step loop's arrays to the model's and the sampler's tensors. Knows shapes and types, and where slots lie."""

import numpy as np
import numpy.typing as npt
import torch

from paceline_executor.models.interface import ForwardInputs
from paceline_executor.runner.interface import SamplingColumns, StepBatch
from paceline_kernels.sampling import SamplingParameters


def forward_inputs(batch: StepBatch, block_size: int) -> ForwardInputs:
    """The batch as CPU tensors, with the slot of every token.

    Raises IndexError when a position lies outside of its row's block table.
    """
    rows = np.repeat(np.arange(batch.context_lens.size), np.diff(batch.cu_seqlens))
    blocks = batch.block_tables[rows, batch.positions // block_size].astype(np.int64)
    return ForwardInputs(
        token_ids=_tensor(batch.token_ids, np.int32),
        positions=_tensor(batch.positions, np.int32),
        slot_mapping=_tensor(blocks * block_size + batch.positions % block_size, np.int64),
        cu_seqlens=_tensor(batch.cu_seqlens, np.int32),
        context_lens=_tensor(batch.context_lens, np.int32),
        block_tables=_tensor(batch.block_tables, np.int32),
        logit_tokens=_tensor(batch.cu_seqlens[1:][batch.sampled] - 1, np.int32),
    )


def sampling_parameters(columns: SamplingColumns) -> SamplingParameters:
    """The columns as CPU tensors."""
    return SamplingParameters(
        temperature=_tensor(columns.temperature, np.float32),
        top_k=_tensor(columns.top_k, np.int32),
        top_p=_tensor(columns.top_p, np.float32),
        min_p=_tensor(columns.min_p, np.float32),
        seeds=_tensor(columns.seeds, np.uint64).view(torch.int64),
        offsets=_tensor(columns.offsets, np.int32),
        num_logprobs=_tensor(columns.num_logprobs, np.int32),
    )


def _tensor(values: npt.NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
    """A tensor over the array, or over a copy where the array is of another type, strided or read-only."""
    return torch.from_numpy(np.require(values, dtype=dtype, requirements=["C", "W"]))
