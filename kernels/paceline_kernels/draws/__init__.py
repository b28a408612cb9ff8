"""draws: which tokens of a step have a token drawn after them, and how rows advance by what was drawn.

With the state of rows on the device and no look at it from the host, a step is

    batch = step_inputs(state, plan, ...)        what is computed
    draws = draw_inputs(state, rows, plan, batch, ...)
    logits = the model's, of the tokens draws.places
    rules = DrawRules(row_rules, draws.rows, state.token_ids, rows.num_prompt)   where rows may have any
    samples = sample(logits, draws.parameters, rules, max_logprobs=...)
    advanced = advance_rows(state, rows, plan, batch, draws, samples)

and the next one can be queued before this one has ended.

Drafts are verified on the way. A row that computes d drafts draws 1 + d tokens: after its last known token, and after
every draft as if that were right. Each draw is keyed by its own offset, and rules take drafts before it for drawn, so
it is the very token that decoding step by step would draw if all drafts before it are right. So the first draw counts,
and each further one counts if the draft before it equals the draw before it (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023, https://arxiv.org/abs/2211.17192, for the exact match of keyed draws
instead of a ratio of probabilities). Tokens are then the same with drafts and without, for any drafts.

Knows rows, tokens and limits; not who planned, nor who drafted.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.devices import is_cpu
from paceline_kernels.draws.columns import Advanced, DrawInputs, FinishCode, RowDraws
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.sampling.columns import Samples
from paceline_kernels.step_inputs import MAX_PLANNED_ROWS, PlanColumns, RowBuffers, StepInputs

__all__ = [
    "MAX_DRAFTS",
    "MAX_END_TOKENS",
    "Advanced",
    "DrawInputs",
    "FinishCode",
    "RowDraws",
    "advance_rows",
    "check_rows",
    "draw_inputs",
]

MAX_DRAFTS = 63
MAX_END_TOKENS = 128


def draw_inputs(
    state: RowBuffers, rows: RowDraws, plan: PlanColumns, batch: StepInputs, num_draws: int, max_drafts: int = 0
) -> DrawInputs:
    """The draws of a batch that `step_inputs` made of this state and plan: one per row that computes its last known
    token, and one per draft that it computes.

    num_draws: how many draws there are with their padding; rows behind them draw less, or nothing, and compute what
    they would have drawn from again. max_drafts: of one row, 0 to MAX_DRAFTS; further ones are computed in vain.
    Padding has the place -1, of which `take_rows` makes NaN, so that nothing is drawn there.
    Runs on the state's device without waiting for it. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op = "draw_inputs"
    _check_rows(op, state, rows)
    _check_plan(op, plan, batch)
    _check_drafts(op, max_drafts)
    if is_cpu(state.token_ids.device):
        from paceline_kernels.draws import cpu

        return cpu.draw_inputs(state, rows, plan, batch, num_draws, max_drafts)
    if gpu.has_kernels(state.token_ids.device):
        from paceline_kernels.draws import triton

        return triton.draw_inputs(state, rows, plan, batch, num_draws, max_drafts)
    raise UnsupportedDeviceError(op, state.token_ids.device, gpu.DEVICES)


def advance_rows(
    state: RowBuffers,
    rows: RowDraws,
    plan: PlanColumns,
    batch: StepInputs,
    draws: DrawInputs,
    samples: Samples,
    max_drafts: int = 0,
) -> Advanced:
    """Count what was computed, append what was drawn as far as drafts were right, end the rows that are done; in place.

    samples: what `sample` drew with draws.parameters. max_drafts: as given to draw_inputs. Of state change token_ids,
    num_held (drafts that were not accepted are dropped), num_computed and finish, of rows num_known, for rows that the
    plan names and that go on. A row takes no token behind one that ends it, nor behind a draw that failed, which ends
    it with ERROR. Computed are the tokens whose keys and values are right: of a row that ended otherwise, all but its
    last. Runs on the state's device without waiting for it. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op, num_draws = "advance_rows", draws.places.shape[0]
    _check_rows(op, state, rows)
    _check_plan(op, plan, batch)
    _check_drafts(op, max_drafts)
    check_tensor(op, "cu_draws", draws.cu_draws, torch.int32, (plan.rows.shape[0] + 1,))
    check_tensor(op, "samples.token_ids", samples.token_ids, torch.int32, (num_draws,))
    check_tensor(op, "outcomes", samples.outcomes, torch.int32, (num_draws,))
    if is_cpu(state.token_ids.device):
        from paceline_kernels.draws import cpu

        return cpu.advance_rows(state, rows, plan, batch, draws, samples)
    if gpu.has_kernels(state.token_ids.device):
        from paceline_kernels.draws import triton

        return triton.advance_rows(state, rows, plan, batch, draws, samples, max_drafts)
    raise UnsupportedDeviceError(op, state.token_ids.device, gpu.DEVICES)


def check_rows(op: str, state: RowBuffers, rows: RowDraws, plan: PlanColumns, max_drafts: int) -> None:
    """For operations on planned rows. Raises KernelArgumentError."""
    _check_rows(op, state, rows)
    _check_planned(op, plan)
    _check_drafts(op, max_drafts)


def _check_rows(op: str, state: RowBuffers, rows: RowDraws) -> None:
    num_rows = state.num_held.shape[0]
    check_tensor(op, "token_ids", state.token_ids, torch.int32, (num_rows, None))
    check_tensor(op, "end_tokens", rows.end_tokens, torch.int32, (num_rows, None))
    if rows.end_tokens.shape[1] > MAX_END_TOKENS:
        raise KernelArgumentError(op, f"a row has up to {MAX_END_TOKENS} end tokens, not {rows.end_tokens.shape[1]}")
    check_tensor(op, "finish", state.finish, torch.int32, (num_rows,))
    counts = {
        "num_held": state.num_held,
        "num_computed": state.num_computed,
        "num_prompt": rows.num_prompt,
        "num_known": rows.num_known,
        "max_known": rows.max_known,
        "top_k": rows.top_k,
        "num_logprobs": rows.num_logprobs,
    }
    for name, column in counts.items():
        check_tensor(op, name, column, torch.int32, (num_rows,))
    for name, column in {"temperature": rows.temperature, "top_p": rows.top_p, "min_p": rows.min_p}.items():
        check_tensor(op, name, column, torch.float32, (num_rows,))
    check_tensor(op, "seeds", rows.seeds, torch.int64, (num_rows,))


def _check_plan(op: str, plan: PlanColumns, batch: StepInputs) -> None:
    num_planned = plan.rows.shape[0]
    check_tensor(op, "cu_seqlens", batch.cu_seqlens, torch.int32, (num_planned + 1,))
    check_tensor(op, "context_lens", batch.context_lens, torch.int32, (num_planned,))
    _check_planned(op, plan)


def _check_planned(op: str, plan: PlanColumns) -> None:
    num_planned = plan.rows.shape[0]
    check_tensor(op, "rows", plan.rows, torch.int32, (num_planned,))
    if not 1 <= num_planned <= MAX_PLANNED_ROWS:
        raise KernelArgumentError(op, f"a plan names 1 to {MAX_PLANNED_ROWS} rows, not {num_planned}")


def _check_drafts(op: str, max_drafts: int) -> None:
    if not 0 <= max_drafts <= MAX_DRAFTS:
        raise KernelArgumentError(op, f"a row has 0 to {MAX_DRAFTS} drafts, not {max_drafts}")
