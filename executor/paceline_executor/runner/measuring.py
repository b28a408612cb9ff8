"""Steps without a scheduler: a whole prompt in a row of its own, as warm-ups measure it and validation reads it.

Apart from the runners, all of which measure the same.
"""

from collections.abc import Callable, Sequence

import numpy as np

from paceline_executor.runner.interface import (
    BlockCells,
    HostTokenLists,
    Int32Array,
    RowDescriptions,
    SamplingColumns,
    StepBatch,
    StepOutput,
)

_NUM_MEASUREMENTS = 3


def prompt(
    token_ids: Int32Array, block_size: int, *, row: int = 0, most: int | None = None, end_token_ids: Sequence[int] = ()
) -> StepBatch:
    """On a row described anew, with a greedy draw behind it. most: tokens that it comes to, by default one more; rows
    with the same `most` have blocks of their own.
    """
    zero, one = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
    num_tokens, most = one * token_ids.size, most or token_ids.size + 1
    described = RowDescriptions(
        rows=one * row,
        num_prompt=num_tokens,
        num_computed=zero,
        max_known=one * most,
        end_token_ids=np.array([[*end_token_ids, -1]], dtype=np.int32),
        sampling=SamplingColumns.greedy(1),
        rules=(None,),
        known=HostTokenLists.of([token_ids]),
    )
    indices = np.arange(-(-(most - 1) // block_size), dtype=np.int32)  # the last token needs no slot
    cells = BlockCells(np.full_like(indices, row), indices, indices + row * indices.size)
    return StepBatch(one * row, num_tokens, num_tokens, zero, described, cells)


def fastest_ns(step: Callable[[], StepOutput]) -> int:
    """Disturbances only slow steps down."""
    outputs = [step() for _ in range(_NUM_MEASUREMENTS)]
    return min(output.forward_ns + output.sample_ns for output in outputs)
