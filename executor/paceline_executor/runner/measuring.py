"""The steps that a warm-up measures: a chunk of a prompt, a few times.

Apart from the runners, all of which measure the same.
"""

from collections.abc import Callable

import numpy as np

from paceline_executor.runner.interface import SamplingColumns, StepBatch, StepOutput

_NUM_MEASUREMENTS = 3


def chunk(num_tokens: int, block_size: int) -> StepBatch:
    """On one row, in the first blocks, with a greedy draw behind it."""
    zero, one = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
    return StepBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=np.arange(num_tokens, dtype=np.int32),
        cu_seqlens=np.array([0, num_tokens], dtype=np.int32),
        context_lens=one * num_tokens,
        block_tables=np.arange(-(-num_tokens // block_size), dtype=np.int32)[None],
        sampled=zero,
        sampling=SamplingColumns.greedy(1),
    )


def fastest_ns(step: Callable[[], StepOutput]) -> int:
    """Disturbances only slow steps down."""
    outputs = [step() for _ in range(_NUM_MEASUREMENTS)]
    return min(output.forward_ns + output.sample_ns for output in outputs)
