"""plan_ring in plain Python, one word at a time."""

import torch

from paceline_kernels.plan_ring.ring import PlanRing
from paceline_kernels.step_inputs import PlanColumns


def read_plan(ring: PlanRing, step: torch.Tensor, words: torch.Tensor, num_planned: int) -> PlanColumns:
    """See `paceline_kernels.plan_ring.read_plan`, without the time."""
    slot = int(step) % ring.counts.shape[0]
    num_words, num_rows = ring.counts[slot].tolist()
    write_words(words, ring.places[slot, :num_words], ring.values[slot, :num_words])
    planned = [
        (int(ring.rows[slot, place]), int(ring.num_tokens[slot, place])) if place < num_rows else (-1, 0)
        for place in range(num_planned)
    ]
    rows, num_tokens = zip(*planned, strict=True)
    return PlanColumns(torch.tensor(rows, dtype=torch.int32), torch.tensor(num_tokens, dtype=torch.int32))


def write_words(words: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """See `paceline_kernels.plan_ring.write_words`."""
    for place, value in zip(places.tolist(), values.tolist(), strict=True):
        if 0 <= place < len(words):
            words[place] = value
