"""What the core tells the edge: columns of new tokens, and requests that failed.

Element i belongs to `handles[i]`, the edge's own number.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.plan.values import Int32Array, TokenLogprobs, UInt64Array
from paceline_scheduler.core.phases import PhaseTimes
from paceline_scheduler.errors import RequestFailedError

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DraftCounts:
    num_verified: int = 0
    num_accepted: int = 0


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class FinishNotice:
    """Only `num_output_tokens` count; `times` are None if a former scheduler knew them."""

    reason: int  # FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    times: PhaseTimes | None = None
    drafts: DraftCounts = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """`token_ids` holds `num_tokens[i]` tokens of request i, one request after another."""

    handles: tuple[int, ...]
    offsets: Int32Array  # [num_requests] index of the first new token in the output
    num_tokens: Int32Array  # [num_requests]
    token_ids: Int32Array  # [sum(num_tokens)]
    attempts: Int32Array  # [num_requests]
    rolling_hashes: UInt64Array  # [num_requests] after the last new token
    finishes: dict[int, FinishNotice] = field(default_factory=dict)  # by handle
    intervals_s: Float64Array = field(default_factory=lambda: np.zeros(0))  # [num_requests] since the token before,
    # NaN where there was none; empty: not of a step
    first_tokens_s: dict[int, float] = field(default_factory=dict)  # by handle, since submission
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by handle
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by handle, with offset 0

    def gaps(self) -> tuple[Float64Array, Int32Array]:
        return gaps(self.intervals_s, self.num_tokens[: len(self.intervals_s)])


def gaps(intervals_s: Float64Array, num_tokens: Int32Array) -> tuple[Float64Array, Int32Array]:
    """Return seconds between tokens, and how many tokens took so long each: those that came together share."""
    is_first = np.isnan(intervals_s)
    if np.count_nonzero(is_first) or np.count_nonzero(num_tokens) < len(num_tokens):
        known = ~is_first & (num_tokens > 0)
        intervals_s, num_tokens = intervals_s[known], num_tokens[known]
    return intervals_s / num_tokens, num_tokens


@dataclass(frozen=True, slots=True)
class Resumed:
    """`prefix_token_ids` is the output before what the client wants, for rebuilding the text; `outputs` what there is
    beyond that.
    """

    prefix_token_ids: Int32Array  # [resume_from]
    outputs: TokenOutputs | None


@dataclass(frozen=True, slots=True)
class Failure:
    handle: int
    error: RequestFailedError
