"""draws in plain Python, one row and one draw at a time."""

import torch

from paceline_kernels.draws.columns import Advanced, DrawInputs, FinishCode, RowDraws
from paceline_kernels.sampling.columns import SampleOutcome, Samples, SamplingParameters
from paceline_kernels.step_inputs import PlanColumns, RowBuffers, StepInputs


def draw_inputs(
    state: RowBuffers, rows: RowDraws, plan: PlanColumns, batch: StepInputs, num_draws: int, max_drafts: int = 0
) -> DrawInputs:
    places: list[int] = []
    drawn_rows: list[int] = []
    offsets: list[int] = []
    cu_draws = [0]
    for planned, row in enumerate(plan.rows.tolist()):
        if 0 <= row < state.num_held.shape[0] and not state.finish[row]:
            end, context_len = int(batch.cu_seqlens[planned + 1]), int(batch.context_lens[planned])
            num_known = int(rows.num_known[row])
            stop = min(context_len + 1, num_known + 1 + max_drafts, num_known + num_draws - len(places))
            for position in range(num_known, stop):  # of the tokens that are drawn
                places.append(end - (context_len + 1 - position))
                drawn_rows.append(row)
                offsets.append(position - int(rows.num_prompt[row]))
        cu_draws.append(len(places))
    padding = num_draws - len(places)

    def of_rows(column: torch.Tensor, rest: float) -> torch.Tensor:
        return torch.tensor([column[row].item() for row in drawn_rows] + [rest] * padding, dtype=column.dtype)

    return DrawInputs(
        places=torch.tensor(places + [-1] * padding, dtype=torch.int32),
        cu_draws=torch.tensor(cu_draws, dtype=torch.int32),
        rows=torch.tensor(drawn_rows + [-1] * padding, dtype=torch.int32),
        parameters=SamplingParameters(
            temperature=of_rows(rows.temperature, 0),
            top_k=of_rows(rows.top_k, 0),
            top_p=of_rows(rows.top_p, 1),
            min_p=of_rows(rows.min_p, 0),
            seeds=of_rows(rows.seeds, 0),
            offsets=torch.tensor(offsets + [0] * padding, dtype=torch.int32),
            num_logprobs=of_rows(rows.num_logprobs, -1),
        ),
    )


def advance_rows(
    state: RowBuffers,
    rows: RowDraws,
    plan: PlanColumns,
    batch: StepInputs,
    draws: DrawInputs,
    samples: Samples,
    max_drafts: int = 0,  # noqa: ARG001  # one signature
) -> Advanced:
    advanced = [(0, FinishCode.GOES_ON)] * plan.rows.shape[0]
    for planned, row in enumerate(plan.rows.tolist()):
        if 0 <= row < state.num_held.shape[0]:
            finish = FinishCode(int(state.finish[row]))
            advanced[planned] = (0, finish)
            if finish is FinishCode.GOES_ON:
                drawn = slice(*draws.cu_draws[planned : planned + 2].tolist())
                token_ids, outcomes = samples.token_ids[drawn].tolist(), samples.outcomes[drawn].tolist()
                context_len = int(batch.context_lens[planned])
                advanced[planned] = _advance(state, rows, row, context_len, token_ids, outcomes)
    return Advanced(
        num_accepted=torch.tensor([accepted for accepted, _ in advanced], dtype=torch.int32),
        finish=torch.tensor([finish for _, finish in advanced], dtype=torch.uint8),
    )


def _advance(
    state: RowBuffers, rows: RowDraws, row: int, context_len: int, token_ids: list[int], outcomes: list[int]
) -> tuple[int, FinishCode]:
    """One row that goes on, by what it has drawn. Returns how many tokens it got, and whether it ended."""
    num_known = int(rows.num_known[row])
    drafts = state.token_ids[row, num_known : num_known + len(token_ids) - 1].tolist()
    num_accepted, finish = 0, FinishCode.GOES_ON
    num_right = num_known - 1  # tokens whose keys and values are right once they are computed
    for draw, (token_id, outcome) in enumerate(zip(token_ids, outcomes, strict=True)):
        num_right = num_known + draw
        if outcome != SampleOutcome.DRAWN:
            finish = FinishCode.ERROR
            break
        if num_known + draw == state.token_ids.shape[1]:
            finish = FinishCode.CONTEXT_FULL
            break
        state.token_ids[row, num_known + draw] = token_id
        num_accepted = draw + 1
        finish = _finish(state, rows, row, num_known + num_accepted, token_id)
        if finish is not FinishCode.GOES_ON or draw == len(drafts) or token_id != drafts[draw]:
            break
    state.num_computed[row] = min(context_len, num_right)
    state.num_held[row] = rows.num_known[row] = num_known + num_accepted
    state.finish[row] = finish
    return num_accepted, finish


def _finish(state: RowBuffers, rows: RowDraws, row: int, num_known: int, token_id: int) -> FinishCode:
    """What a row's latest token means for it."""
    if token_id in rows.end_tokens[row].tolist():
        return FinishCode.END_TOKEN
    if num_known >= rows.max_known[row]:
        return FinishCode.LENGTH
    return FinishCode.CONTEXT_FULL if num_known >= state.token_ids.shape[1] else FinishCode.GOES_ON
