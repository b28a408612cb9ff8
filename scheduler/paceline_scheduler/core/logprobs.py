"""Log-probabilities on their way from executors to clients: as columns where there are many, else token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline_scheduler.core.request import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position: the drawn token and the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log-probabilities of tokens that follow one another; the first is token `offset` of the output, or the prompt."""

    offset: int
    logprobs: Float32Array  # [num_tokens]
    top_token_ids: Int32Array  # [num_tokens, num_top], best first
    top_logprobs: Float32Array  # [num_tokens, num_top]

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.offset + len(self.logprobs)

    def of(self, offset: int, token_ids: Int32Array) -> tuple[TokenLogprobs, ...]:
        """Return those of these tokens, the first of which is token `offset`; all must be here."""
        start = offset - self.offset
        assert 0 <= start <= start + len(token_ids) <= len(self.logprobs), "log-probabilities of every token"
        index = slice(start, start + len(token_ids))
        tops = zip(self.top_token_ids[index].tolist(), self.top_logprobs[index].tolist(), strict=True)
        drawn = zip(token_ids.tolist(), self.logprobs[index].tolist(), tops, strict=True)
        return tuple(TokenLogprobs(token, logprob, tuple(zip(*top, strict=True))) for token, logprob, top in drawn)


class KeptLogprobs:
    """Those of an output from token `offset` on, which grow with it."""

    __slots__ = ("offset", "tokens")

    def __init__(self, offset: int, tokens: Sequence[TokenLogprobs] = ()) -> None:
        self.offset = offset
        self.tokens = list(tokens)

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.offset + len(self.tokens)

    def between(self, start: int, end: int) -> tuple[TokenLogprobs, ...] | None:
        """Return those of tokens [start, end), None when not all are here."""
        if start < self.offset or end > self.end:
            return None if start < end else ()
        return tuple(self.tokens[start - self.offset : end - self.offset])


def joined(parts: Sequence[LogprobColumns]) -> LogprobColumns:
    """Return columns that follow one another as one."""
    return LogprobColumns(
        offset=parts[0].offset,
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_token_ids=np.concatenate([part.top_token_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )
