"""prompt_lookup for CPUs: one pass over each row, from its end, in the calling thread."""

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.compiler import jit
from paceline_kernels.draws import RowDraws
from paceline_kernels.prompt_lookup import MAX_MATCH, MIN_MATCH
from paceline_kernels.step_inputs import PlanColumns, RowBuffers

_Int32Array = npt.NDArray[np.int32]


def lookup_drafts(
    state: RowBuffers, rows: RowDraws, plan: PlanColumns, max_drafts: int, min_chance: torch.Tensor
) -> None:
    num_known, num_held = rows.num_known.numpy(), state.num_held.numpy()
    planned, tokens = plan.rows.numpy(), state.token_ids.numpy()
    exists = (planned >= 0) & (planned < len(num_held))
    row = np.where(exists, planned, 0)
    wanted = plan.num_tokens.numpy() - (num_known - state.num_computed.numpy())[row]
    wanted = np.minimum(np.minimum(wanted, max_drafts), tokens.shape[1] - num_known[row])
    goes_on = exists & (state.finish.numpy()[row] == 0)
    for place in np.flatnonzero(goes_on & (wanted > 0)).tolist():
        known = int(num_known[row[place]])
        num_held[row[place]] = known + look_up(tokens[row[place]], known, int(wanted[place]), min_chance.item())


@jit.compiled_for_python
def look_up(tokens: _Int32Array, num_known: int, num_wanted: int, min_chance: float) -> int:
    """Write drafts behind the known tokens; returns how many."""
    last, longest, match = num_known - 1, 0, 0
    for place in range(last - 1, -1, -1):
        length = 0
        while length < MAX_MATCH and length <= place and tokens[place - length] == tokens[last - length]:
            length += 1
        if length > longest:
            longest, match = length, place
            if longest == MAX_MATCH:
                break
    if longest < MIN_MATCH:
        return 0
    chance = 1.0
    for draft in range(num_wanted):
        chance *= 1 - 1 / min(longest + draft, MAX_MATCH)
        if chance < min_chance:
            return draft
        tokens[num_known + draft] = tokens[match + 1 + draft % (last - match)]
    return num_wanted
