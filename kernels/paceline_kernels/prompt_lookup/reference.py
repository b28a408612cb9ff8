"""prompt_lookup in plain Python, one place at a time."""

import torch

from paceline_kernels.draws import RowDraws
from paceline_kernels.prompt_lookup import MAX_MATCH, MIN_MATCH
from paceline_kernels.step_inputs import PlanColumns, RowBuffers


def lookup_drafts(
    state: RowBuffers, rows: RowDraws, plan: PlanColumns, max_drafts: int, min_chance: torch.Tensor
) -> None:
    for row, num_tokens in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
        if not 0 <= row < state.num_held.shape[0] or state.finish[row]:
            continue
        num_known, num_computed = int(rows.num_known[row]), int(state.num_computed[row])
        num_wanted = min(num_tokens - (num_known - num_computed), max_drafts, state.token_ids.shape[1] - num_known)
        drafts = _drafts(state.token_ids[row, :num_known].tolist(), num_wanted, min_chance.item())
        for place, token_id in enumerate(drafts, num_known):
            state.token_ids[row, place] = token_id
            state.num_held[row] = place + 1


def _drafts(known: list[int], num_wanted: int, min_chance: float) -> list[int]:
    longest, match = 0, 0
    for place in range(len(known) - 1):
        length = 0
        while length <= min(place, MAX_MATCH - 1) and known[place - length] == known[-1 - length]:
            length += 1
        if length >= longest:
            longest, match = length, place
    if longest < MIN_MATCH:
        return []
    repeated, chance, drafts = known[match + 1 :], 1.0, []
    for draft in range(num_wanted):
        chance *= 1 - 1 / min(longest + draft, MAX_MATCH)
        if chance < min_chance:
            break
        drafts.append(repeated[draft % len(repeated)])
    return drafts
