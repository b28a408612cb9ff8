"""What is kept of a request's output while it is on no row.

Apart from `live`, since nothing here knows what becomes of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import Int32Array, TokenLogprobs
from paceline_scheduler.core.outputs import NO_DRAFTS, DraftCounts
from paceline_scheduler.core.prefix import PrefixChain


class RetainedLogprobs:
    """Keeps those of output tokens from `offset` on."""

    __slots__ = ("offset", "tokens")

    def __init__(self, offset: int, tokens: Sequence[TokenLogprobs] = ()) -> None:
        self.offset = offset
        self.tokens = list(tokens)

    @property
    def end(self) -> int:
        return self.offset + len(self.tokens)

    def between(self, start: int, end: int) -> tuple[TokenLogprobs, ...] | None:
        """Returns None unless all of [start, end) are here."""
        if start < self.offset or end > self.end:
            return None if start < end else ()
        return tuple(self.tokens[start - self.offset : end - self.offset])


@dataclass(slots=True, eq=False)
class RetainedOutput:
    """The tokens as they were when the request left its row."""

    token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    rolling_hash: int = HASH_START  # of token_ids
    logprobs: RetainedLogprobs | None = None  # if asked for; some may be missing
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # the same for the prompt, once delivered
    chains: dict[tuple[bytes, int], PrefixChain] = field(default_factory=dict)  # by tag key and block size
    drafts: DraftCounts = NO_DRAFTS

    @staticmethod
    def of(token_ids: Int32Array, logprobs: RetainedLogprobs | None = None) -> "RetainedOutput":
        return RetainedOutput(token_ids, rolling_hash(HASH_START, token_ids), logprobs)

    def append(self, token_ids: Int32Array) -> None:
        self.token_ids = np.concatenate((self.token_ids, token_ids))
        self.rolling_hash = rolling_hash(self.rolling_hash, token_ids)

    def go_on_from(self, token_ids: Int32Array) -> None:
        """The keys of its blocks become void."""
        self.token_ids = token_ids
        self.rolling_hash = rolling_hash(HASH_START, token_ids)
        self.chains.clear()

    def forget_logprobs(self) -> None:
        self.logprobs = self.prompt_logprobs = None

    def retain_logprobs(self, offset: int, tokens: tuple[TokenLogprobs, ...]) -> None:
        if self.logprobs is None or self.logprobs.end != offset:
            self.logprobs = RetainedLogprobs(offset)
        self.logprobs.tokens.extend(tokens)
