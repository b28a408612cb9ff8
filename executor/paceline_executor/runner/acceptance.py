"""Which draws of a step count: speculative decoding with an exact match, so drafts change no token.

A row with d drafts draws 1 + d tokens: after its last known token, and after each draft as if that were right. A draw
is keyed by its own offset, and its row's rules take the drafts before it for drawn, so it is what decoding one by one
would draw if these are right. Hence the first draw counts, and each further one while the draft before it is the draw
before it (Leviathan et al., 2023, https://arxiv.org/abs/2211.17192, with an exact match of keyed draws in place of a
ratio of probabilities). It is the rule of `paceline_kernels.draws`, which devices that keep rows follow.

Knows batches and tokens. A draw that failed counts as little as those behind it; its row fails when it is the first.
"""

import numpy as np
import numpy.typing as npt

from paceline_executor.runner.interface import BoolArray, Int32Array, StepBatch


def places_of_draws(batch: StepBatch) -> Int32Array:
    """The tokens of the batch after which something is drawn, [num_draws], sampled row after sampled row."""
    last = batch.cu_seqlens[1:][batch.sampled] - 1
    if batch.num_drafts is None:
        return last
    num_draws = batch.num_drafts + 1
    ends = np.cumsum(num_draws, dtype=np.int32)
    places: Int32Array = np.arange(num_draws.sum(), dtype=np.int32) + np.repeat(last + 1 - ends, num_draws)
    return places


def first_draws(batch: StepBatch) -> npt.NDArray[np.intp] | slice:
    """The first draw of every sampled row."""
    return slice(None) if batch.num_drafts is None else np.cumsum(batch.num_drafts + 1) - batch.num_drafts - 1


def counting_draws(batch: StepBatch, drawn: Int32Array, is_drawn: BoolArray) -> tuple[Int32Array, BoolArray]:
    """How many draws of every sampled row count, [num_sampled], and which do, [num_draws].

    drawn: [num_draws] tokens, of those that `is_drawn`.
    """
    if batch.num_drafts is None:
        return is_drawn.astype(np.int32), is_drawn
    num_draws = batch.num_drafts + 1
    first = np.cumsum(num_draws) - num_draws
    following = np.append(batch.token_ids, -1)[places_of_draws(batch) + 1]  # behind a last draw something else
    goes_on = is_drawn & (drawn == following)
    num_wrong = np.concatenate(([0], np.cumsum(~goes_on)))[:-1]  # before each draw
    counts = is_drawn & (num_wrong == np.repeat(num_wrong[first], num_draws))
    return np.add.reduceat(counts, first, dtype=np.int32) if first.size else np.zeros(0, dtype=np.int32), counts
