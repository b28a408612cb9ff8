"""Which draws of a step count, by the rule of `paceline_kernels.draws`: the first, and each further one while the draft
before it is the draw before it. A failed draw does not count, nor those behind it.

For runners without a model; `draws` has it for the others.
"""

import numpy as np

from paceline_executor.runner.interface import BoolArray, FlatBatch, Int32Array


def places_of_draws(batch: FlatBatch) -> Int32Array:
    """Returns places of tokens in the batch, [num_draws]."""
    last = batch.cu_seqlens[1:][batch.sampled] - 1
    if batch.num_drafts is None:
        return last
    num_draws = batch.num_drafts + 1
    ends = np.cumsum(num_draws, dtype=np.int32)
    places: Int32Array = np.arange(num_draws.sum(), dtype=np.int32) + np.repeat(last + 1 - ends, num_draws)
    return places


def counting_draws(batch: FlatBatch, drawn: Int32Array, is_drawn: BoolArray) -> tuple[Int32Array, BoolArray]:
    """Returns how many draws of every sampled row count, and which do. drawn: [num_draws] tokens."""
    if batch.num_drafts is None:
        return is_drawn.astype(np.int32), is_drawn
    num_draws = batch.num_drafts + 1
    first = np.cumsum(num_draws) - num_draws
    following = np.append(batch.token_ids, -1)[places_of_draws(batch) + 1]
    goes_on = is_drawn & (drawn == following)
    num_wrong = np.concatenate(([0], np.cumsum(~goes_on)))[:-1]  # before each draw
    counts = is_drawn & (num_wrong == np.repeat(num_wrong[first], num_draws))
    return np.add.reduceat(counts, first, dtype=np.int32) if first.size else np.zeros(0, dtype=np.int32), counts
