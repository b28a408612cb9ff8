"""prompt_lookup for CPUs: numpy over all places of a row at once, in the calling thread."""

import numpy as np
import torch

from paceline_kernels.draws import RowDraws
from paceline_kernels.prompt_lookup import MAX_MATCH, MIN_MATCH
from paceline_kernels.step_inputs import PlanColumns, RowState


def lookup_drafts(
    state: RowState, rows: RowDraws, plan: PlanColumns, max_drafts: int, min_chance: torch.Tensor
) -> None:
    num_known, num_held = rows.num_known.numpy(), state.num_held.numpy()
    planned = plan.rows.numpy()
    exists = (planned >= 0) & (planned < len(num_held))
    row = np.where(exists, planned, 0)
    wanted = plan.num_tokens.numpy() - (num_known - state.num_computed.numpy())[row]
    wanted = np.minimum(np.minimum(wanted, max_drafts), state.token_ids.shape[1] - num_known[row])
    goes_on = exists & (state.finish.numpy()[row] == 0)
    for place in np.flatnonzero(goes_on & (wanted > 0)).tolist():
        _look_up(state, int(row[place]), int(num_known[row[place]]), int(wanted[place]), min_chance.item())


def _look_up(state: RowState, row: int, known: int, wanted: int, min_chance: float) -> None:
    tokens, last = state.token_ids.numpy()[row], known - 1
    places, back = np.arange(max(last, 0)), np.arange(min(MAX_MATCH, known))
    before = places[:, None] - back
    is_alike = (tokens[np.maximum(before, 0)] == tokens[last - back]) & (before >= 0)
    lengths = np.logical_and.accumulate(is_alike, axis=1).sum(axis=1)
    longest = int(lengths.max(initial=0))
    if longest < MIN_MATCH:
        return
    chances = np.cumprod(1 - 1 / np.minimum(longest + np.arange(wanted), MAX_MATCH))
    wanted = int((chances >= min_chance).sum())
    match = int(np.flatnonzero(lengths == longest)[-1])
    tokens[known : known + wanted] = tokens[match + 1 + np.arange(wanted) % (last - match)]
    state.num_held.numpy()[row] = known + wanted
