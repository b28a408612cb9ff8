"""The steps that a warm-up measures: a chunk of a prompt, a few times.

Apart from the runners, all of which measure the same.
"""

from collections.abc import Callable

import numpy as np

from paceline_executor.runner.interface import (
    BlockCells,
    RowDescriptions,
    SamplingColumns,
    StepBatch,
    StepOutput,
    TokenLists,
)

_NUM_MEASUREMENTS = 3


def chunk(num_tokens: int, block_size: int) -> StepBatch:
    """On row 0, described anew, in the first blocks, with a greedy draw behind it."""
    zero, one = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
    described = RowDescriptions(
        rows=zero,
        num_prompt=one * num_tokens,
        num_computed=zero,
        max_known=one * num_tokens + 1,
        end_token_ids=zero[None] - 1,
        sampling=SamplingColumns.greedy(1),
        rules=(None,),
        known=TokenLists.of([np.zeros(num_tokens, dtype=np.int32)]),
    )
    blocks = np.arange(-(-num_tokens // block_size), dtype=np.int32)
    cells = BlockCells(np.zeros_like(blocks), blocks, blocks)
    return StepBatch(zero, one * num_tokens, one * num_tokens, zero, described, cells)


def fastest_ns(step: Callable[[], StepOutput]) -> int:
    """Disturbances only slow steps down."""
    outputs = [step() for _ in range(_NUM_MEASUREMENTS)]
    return min(output.forward_ns + output.sample_ns for output in outputs)
