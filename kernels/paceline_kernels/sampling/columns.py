"""What sampling takes and gives, column by column."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """One element per row of logits, contiguous, in range: the caller has checked them."""

    temperature: torch.Tensor  # [num_rows] float32, >= 0; 0 is greedy
    top_k: torch.Tensor  # [num_rows] int32, >= 0; 0 is off
    top_p: torch.Tensor  # [num_rows] float32, 0 < top_p <= 1; 1 is off
    min_p: torch.Tensor  # [num_rows] float32, 0 <= min_p <= 1; 0 is off
    seeds: torch.Tensor  # [num_rows] int64, the bits of the unsigned 64-bit seed
    offsets: torch.Tensor  # [num_rows] int32, the index of the output token that is drawn
    num_logprobs: torch.Tensor  # [num_rows] int32; below 0 none, 0 the chosen token's, n > 0 also the n best


@dataclass(frozen=True, slots=True)
class Samples:
    """What was drawn. A row with a logit that is NaN or infinite is marked, and its other values mean nothing."""

    token_ids: torch.Tensor  # [num_rows] int32
    is_finite: torch.Tensor  # [num_rows] bool
    logprobs: torch.Tensor  # [num_rows] float32, of the chosen token; set where num_logprobs >= 0
    top_token_ids: torch.Tensor  # [num_rows, max(num_logprobs, 0)] int32, the likeliest first, the lower id on ties
    top_logprobs: torch.Tensor  # of the same shape, float32; each row is set up to its own num_logprobs
