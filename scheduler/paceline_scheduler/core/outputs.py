"""What the core tells the edge: columns of new tokens, and requests that failed.

An element belongs to the request whose `handle` stands at the same index. Handles are the edge's own numbers.
"""

from dataclasses import dataclass, field

from paceline.plan.values import Int32Array, TokenLogprobs, UInt64Array
from paceline_scheduler.errors import RequestFailedError


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """How many drafts of a request were verified, and how many of them became output."""

    num_verified: int = 0
    num_accepted: int = 0


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class Spent:
    """What a request that the edge ends has taken, which the edge does not count."""

    num_cached_tokens: int = 0
    drafts: DraftCounts = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class FinishNotice:
    """The end of a request: the number of its output tokens that count, and what the device saw."""

    reason: int  # FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    drafts: DraftCounts = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """New tokens of one step. `token_ids` holds `num_tokens[i]` tokens of request i, one request after another."""

    handles: tuple[int, ...]
    offsets: Int32Array  # [num_requests] index of the first new token in the output
    num_tokens: Int32Array  # [num_requests]
    token_ids: Int32Array  # [sum(num_tokens)]
    attempts: Int32Array  # [num_requests]
    rolling_hashes: UInt64Array  # [num_requests] after the last new token
    finishes: dict[int, FinishNotice] = field(default_factory=dict)  # by handle
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by handle
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by handle, with offset 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a client that came to a request finds it.

    `prefix_token_ids` is the output before what it still wants, for rebuilding the text; `outputs` what there is beyond
    that, None when there is nothing yet.
    """

    prefix_token_ids: Int32Array  # [resume_from]
    outputs: TokenOutputs | None


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed after it was taken."""

    handle: int
    error: RequestFailedError


@dataclass(frozen=True, slots=True)
class Outputs:
    """Everything that one event produced for the edge."""

    tokens: tuple[TokenOutputs, ...] = ()
    failures: tuple[Failure, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tokens or self.failures)


NO_OUTPUTS = Outputs()
