"""plan_ring for CPUs: numpy on views of the same memory, in the calling thread."""

import numpy as np
import torch

from paceline_kernels.clock.cpu import stamp
from paceline_kernels.plan_ring.ring import PlanRing
from paceline_kernels.step_inputs import PlanColumns


def read_plan(
    ring: PlanRing, step: torch.Tensor, words: torch.Tensor, num_planned: int, clock: torch.Tensor
) -> PlanColumns:
    stamp(clock, 0)
    slot = int(step.numpy()[0]) % ring.counts.shape[0]
    num_words, num_rows = ring.counts.numpy()[slot].tolist()
    if num_words:
        write_words(words, ring.places[slot, :num_words], ring.values[slot, :num_words])
    rows, num_tokens = np.full(num_planned, -1, dtype=np.int32), np.zeros(num_planned, dtype=np.int32)
    count = min(num_rows, num_planned)
    rows[:count] = ring.rows.numpy()[slot, :count]
    num_tokens[:count] = ring.num_tokens.numpy()[slot, :count]
    return PlanColumns(torch.from_numpy(rows), torch.from_numpy(num_tokens))


def write_words(words: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    where, what = places.numpy(), values.numpy()
    exists = (where >= 0) & (where < words.shape[0])
    words.numpy()[where[exists]] = what[exists]
