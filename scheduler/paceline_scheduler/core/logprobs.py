"""The log-probabilities that were told of an output, kept for a client that comes back."""

from collections.abc import Sequence

from paceline.plan.values import TokenLogprobs


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
