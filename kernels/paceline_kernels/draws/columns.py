"""What is kept of rows that draw tokens, and what a step's draws are given and give, column by column."""

import enum
from dataclasses import dataclass

import torch

from paceline_kernels.sampling.columns import SamplingParameters


class FinishCode(enum.IntEnum):
    """Whether and why a row ended: of END_TOKEN, LENGTH and CONTEXT_FULL by the first that holds."""

    GOES_ON = 0
    END_TOKEN = 1  # one of its end tokens was drawn; it is the row's last
    LENGTH = 2  # it has as many tokens as it may
    CONTEXT_FULL = 3  # it has as many tokens as rows have room for
    ERROR = 4  # no token could be drawn


@dataclass(frozen=True, slots=True)
class RowDraws:
    """What the device keeps of every row for drawing its tokens, beside `RowBuffers`. All contiguous.

    A row's first num_known tokens are known; what it holds behind them, up to num_held, are drafts. Of a row that goes
    on, at least one known token is not computed.
    """

    num_prompt: torch.Tensor  # [num_rows] int32
    num_known: torch.Tensor  # [num_rows] int32
    max_known: torch.Tensor  # [num_rows] int32, the number of tokens at which the row ends
    end_tokens: torch.Tensor  # [num_rows, max_end_tokens] int32; -1 where there are fewer
    temperature: torch.Tensor  # [num_rows] float32; this and what follows as in SamplingParameters
    top_k: torch.Tensor  # [num_rows] int32
    top_p: torch.Tensor  # [num_rows] float32
    min_p: torch.Tensor  # [num_rows] float32
    seeds: torch.Tensor  # [num_rows] int64
    num_logprobs: torch.Tensor  # [num_rows] int32


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """Which tokens of a flat batch have a token drawn after them, and how; planned row after planned row."""

    places: torch.Tensor  # [num_draws] int32: the token in the batch whose logits are drawn from; -1 in padding
    cu_draws: torch.Tensor  # [num_planned + 1] int32: draws cu_draws[i]:cu_draws[i + 1] are those of planned row i
    rows: torch.Tensor  # [num_draws] int32: the row that draws; -1 in padding
    parameters: SamplingParameters  # of num_draws rows of logits


@dataclass(frozen=True, slots=True)
class Advanced:
    """What a step brought the planned rows."""

    num_accepted: torch.Tensor  # [num_planned] int32: so many of its draws, the first ones, are the row's new tokens
    finish: torch.Tensor  # [num_planned] uint8, of FinishCode; GOES_ON where the plan names no row
