"""sampling for GPUs: one pass over the logits, then a program per row that looks again where that pass says so.

Knows launches and what kernels leave for each other. Nothing waits for the host: what a CPU refuses because a number is
out of range, a token of a rule or one to be looked up, is left out here, or NaN.
"""

from dataclasses import dataclass

import torch
import triton

from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.gpu import architecture
from paceline_kernels.sampling.columns import (
    PENALTIES,
    DrawRules,
    LogitRules,
    Logprobs,
    RuleTable,
    Samples,
    SamplingParameters,
    TokenLists,
    TokenMasks,
)
from paceline_kernels.sampling.triton.draw import draw_kernel
from paceline_kernels.sampling.triton.launches import LAUNCHES, MAX_LOGPROBS, Launch
from paceline_kernels.sampling.triton.logprobs import take_logprobs_kernel
from paceline_kernels.sampling.triton.rules import apply_rules_kernel, copy_ruled_kernel
from paceline_kernels.sampling.triton.survey import SEGMENT, survey_draws, survey_logprobs

# Of a grid's second dimension.
_MAX_ROWS = 65_535


@dataclass(frozen=True, slots=True)
class _Rows:
    """The logits, and how they are divided and launched."""

    logits: torch.Tensor  # [rows, vocab], float32 or of 16 bits
    launch: Launch

    @property
    def count(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    @property
    def num_segments(self) -> int:
        return -(-self.vocab // int(SEGMENT.value))

    @property
    def padded(self) -> int:
        """Segments, as a program of a row holds them."""
        return int(triton.next_power_of_2(self.num_segments))

    @property
    def survey_grid(self) -> tuple[int, int]:
        return triton.cdiv(self.num_segments, self.launch.survey_segments), self.count

    def empty(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((self.count, width), dtype=dtype, device=self.logits.device)

    def column(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.count, dtype=dtype, device=self.logits.device)


def sample(
    logits: torch.Tensor,
    parameters: SamplingParameters,
    rules: LogitRules | DrawRules | None,
    masks: TokenMasks | None,
    max_logprobs: int,
) -> Samples:
    rows = _rows("sample", logits)
    token_ids, outcomes = rows.column(torch.int32), rows.column(torch.int32)
    if rows.count:
        ruled, is_ruled = None, None
        if rules is not None or masks is not None:
            rules = rules or LogitRules.none(rows.count, logits.device)
            ruled, is_ruled = _apply(rules, masks, parameters.offsets, rows)
        _draw(rows, parameters, ruled, is_ruled, token_ids, outcomes)
    best = _logprobs("sample", rows, token_ids, parameters.num_logprobs, max_logprobs)
    return Samples(token_ids, outcomes, best.logprobs, best.top_token_ids, best.top_logprobs)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: torch.Tensor, max_logprobs: int
) -> Logprobs:
    rows = _rows("token_logprobs", logits)
    return _logprobs("token_logprobs", rows, token_ids, num_logprobs, max_logprobs)


def _rows(op: str, logits: torch.Tensor) -> _Rows:
    if logits.shape[0] > _MAX_ROWS:
        raise KernelArgumentError(op, f"logits must have at most {_MAX_ROWS} rows on a GPU, not {logits.shape[0]}")
    return _Rows(logits, LAUNCHES[architecture.current()])


def _draw(
    rows: _Rows,
    parameters: SamplingParameters,
    ruled: torch.Tensor | None,
    is_ruled: torch.Tensor | None,
    token_ids: torch.Tensor,
    outcomes: torch.Tensor,
) -> None:
    launch, chosen = rows.launch, parameters
    peaks, bounds, masses = (rows.empty(rows.num_segments, torch.float32) for _ in range(3))
    survey_draws[rows.survey_grid](
        rows.logits,
        ruled,
        is_ruled,
        chosen.temperature,
        chosen.top_p,
        chosen.seeds,
        chosen.offsets,
        peaks,
        bounds,
        masses,
        rows.vocab,
        rows.num_segments,
        launch.survey_segments,
        num_warps=launch.survey_warps,
    )
    draw_kernel[(rows.count,)](
        rows.logits,
        ruled,
        is_ruled,
        chosen.temperature,
        chosen.top_k,
        chosen.top_p,
        chosen.min_p,
        chosen.seeds,
        chosen.offsets,
        peaks,
        bounds,
        masses,
        rows.empty(rows.padded, torch.int32),
        rows.empty(launch.capacity, torch.int32),
        token_ids,
        outcomes,
        rows.vocab,
        rows.num_segments,
        rows.padded,
        launch.chunk,
        launch.capacity,
        num_warps=launch.row_warps,
        maxnreg=launch.row_registers,
        enable_fp_fusion=False,  # scores and limits have the bits of the definition
    )


@dataclass(frozen=True, slots=True)
class _Rules:
    """Rules of either kind, as both kernels are given them."""

    rows: torch.Tensor | None
    of_rows: LogitRules | RuleTable
    forbidden: TokenLists
    cu_words: torch.Tensor | None
    words: TokenLists | None
    min_tokens: torch.Tensor | None
    history: tuple[torch.Tensor | None, ...]  # from cu_prompt to num_prompt of `apply_rules_kernel`
    max_tokens: int
    has_history: bool

    @property
    def penalties(self) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self.of_rows, name) for name in PENALTIES)


def _rules_of(rules: LogitRules | DrawRules) -> _Rules:
    if isinstance(rules, LogitRules):
        prompt, output = rules.prompt, rules.output
        return _Rules(
            rows=None,
            of_rows=rules,
            forbidden=rules.forbidden,
            cu_words=None,
            words=None,
            min_tokens=None,
            history=(prompt.cu_lens, prompt.token_ids, output.cu_lens, output.token_ids, None),
            max_tokens=0,
            has_history=prompt.token_ids.shape[0] + output.token_ids.shape[0] > 0,
        )
    kept, tokens = rules.of_rows, rules.token_ids
    return _Rules(
        rows=rules.rows,
        of_rows=kept,
        forbidden=kept.withheld,
        cu_words=kept.cu_words,
        words=kept.words,
        min_tokens=kept.min_tokens,
        history=(None, tokens, None, tokens, rules.num_prompt),
        max_tokens=tokens.shape[1],
        has_history=True,
    )


def _apply(
    given: LogitRules | DrawRules, masks: TokenMasks | None, offsets: torch.Tensor, draws: _Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of draws that have rules or a mask, with both applied, and which draws these are."""
    rules, launch = _rules_of(given), draws.launch
    mask_columns = (None, None, 0) if masks is None else (masks.words, masks.of_draws, masks.words.shape[0])
    kept, block = rules.of_rows, launch.rule_block
    ruled, is_ruled = draws.empty(draws.vocab, torch.float32), draws.column(torch.int32)
    copy_ruled_kernel[(draws.count * triton.cdiv(draws.vocab, block),)](
        draws.logits,
        ruled,
        is_ruled,
        rules.rows,
        kept.allowed.cu_lens,
        rules.forbidden.cu_lens,
        kept.biased.cu_lens,
        rules.cu_words,
        rules.min_tokens,
        offsets,
        *rules.penalties,
        *mask_columns,
        draws.vocab,
        block,
        num_warps=launch.rule_warps,
    )
    apply_rules_kernel[(draws.count,)](
        draws.logits,
        ruled,
        is_ruled,
        rules.rows,
        *(kept.allowed.cu_lens, kept.allowed.token_ids),
        *(rules.forbidden.cu_lens, rules.forbidden.token_ids),
        *(kept.biased.cu_lens, kept.biased.token_ids, kept.biases),
        rules.cu_words,
        *((None, None) if rules.words is None else (rules.words.cu_lens, rules.words.token_ids)),
        *(rules.min_tokens, offsets),
        *rules.penalties,
        *rules.history,
        draws.empty(draws.vocab, torch.int32) if rules.has_history else None,
        *mask_columns,
        draws.vocab,
        rules.max_tokens,
        block,
        num_warps=launch.rule_warps,
        enable_fp_fusion=False,  # as written, so that a penalty is rounded before it is taken off
    )
    return ruled, is_ruled


def _logprobs(op: str, rows: _Rows, token_ids: torch.Tensor, num_logprobs: torch.Tensor, max_logprobs: int) -> Logprobs:
    launch = rows.launch
    width = min(max(max_logprobs, 0), rows.vocab)
    if width > MAX_LOGPROBS:
        raise KernelArgumentError(op, f"max_logprobs must be at most {MAX_LOGPROBS} on a GPU, not {max_logprobs}")
    taken = Logprobs(rows.column(torch.float32), rows.empty(width, torch.int32), rows.empty(width, torch.float32))
    if rows.count == 0 or max_logprobs < 0:
        return taken
    peaks, masses = (rows.empty(rows.num_segments, torch.float32) for _ in range(2))
    survey_logprobs[rows.survey_grid](
        rows.logits,
        num_logprobs,
        peaks,
        masses,
        rows.vocab,
        rows.num_segments,
        launch.survey_segments,
        num_warps=launch.survey_warps,
    )
    take_logprobs_kernel[(rows.count,)](
        rows.logits,
        token_ids,
        num_logprobs,
        peaks,
        masses,
        rows.empty(rows.padded, torch.int32),
        rows.empty(launch.capacity, torch.int32),
        taken.logprobs,
        taken.top_token_ids,
        taken.top_logprobs,
        rows.vocab,
        rows.num_segments,
        width,
        rows.padded,
        launch.chunk,
        launch.capacity,
        num_warps=launch.row_warps,
        maxnreg=launch.row_registers,
    )
    return taken
