"""Stop texts in streamed output: what may become one is held back, what is one ends the output.

Knows characters only, not tokens. What is let through is a function of the text so far, however it arrives.

Which stop text wins: the one that is complete first. Where several are complete at the same character, the longest,
which starts first. The output ends before it, or behind it where it is to be included.
"""

from enum import Enum


class MatchedText(Enum):
    """Whether the stop text that ends an output is part of it."""

    DROPPED = "dropped"
    INCLUDED = "included"


class _Candidate:
    """One stop text, and how many of its characters the text so far ends with (Knuth, Morris and Pratt's automaton)."""

    __slots__ = ("_fallbacks", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallbacks = _fallbacks(text)

    def advance(self, piece: str) -> int | None:
        """Return how many characters of the text complete the stop text, or None."""
        text, num_matched = self.text, self.num_matched
        # Most pieces hold nothing of most stop texts, and find() looks for the first character without a loop here.
        start = 0 if num_matched else piece.find(text[0])
        if start < 0:
            return None
        for index in range(start, len(piece)):
            character = piece[index]
            while num_matched and text[num_matched] != character:
                num_matched = self._fallbacks[num_matched - 1]
            if text[num_matched] == character:
                num_matched += 1
                if num_matched == len(text):
                    return index + 1
        self.num_matched = num_matched
        return None

    def pass_by(self, piece: str) -> None:
        while (end := self.advance(piece)) is not None:
            self.num_matched = self._fallbacks[-1]
            piece = piece[end:]


class StopScanner:
    """The stop texts of one completion. At most the longest of them, less one character, is held back.

    Where matched text is included nothing is: it is part of the output whatever comes after it.
    """

    __slots__ = ("_candidates", "_first_letters", "_held", "_matched_text", "_num_matched")

    def __init__(self, stop_texts: tuple[str, ...], matched_text: MatchedText = MatchedText.DROPPED) -> None:
        self._candidates = [_Candidate(text) for text in stop_texts]
        self._first_letters = frozenset(text[0] for text in stop_texts)
        self._matched_text = matched_text
        self._num_matched = 0  # the longest beginning of a stop text with which the text so far ends
        self._held = ""

    def scan(self, piece: str) -> tuple[str, str | None]:
        """Return the text that may be shown, and the stop text that ends the output, if any; then nothing more may be
        given.
        """
        if not self._num_matched and self._first_letters.isdisjoint(piece):
            # No stop text has begun, and none begins here: the usual case.
            return piece, None
        found = [
            (end, candidate.text) for candidate in self._candidates if (end := candidate.advance(piece)) is not None
        ]
        if found:
            end, stop_text = min(found, key=lambda stop: (stop[0], -len(stop[1])))
            num_dropped = len(stop_text) if self._matched_text is MatchedText.DROPPED else 0
            return (self._held + piece)[: len(self._held) + end - num_dropped], stop_text
        return self._let_through(piece), None

    def pass_by(self, piece: str) -> str:
        """Take text that does not end the output; returns what may be shown. A stop text that begins in it may be
        completed later.
        """
        for candidate in self._candidates:
            candidate.pass_by(piece)
        return self._let_through(piece)

    def flush(self) -> str:
        """Return what was held back for a stop text that did not come."""
        held, self._held = self._held, ""
        return held

    def _let_through(self, piece: str) -> str:
        self._num_matched = max(candidate.num_matched for candidate in self._candidates)
        text = self._held + piece
        num_held = self._num_matched if self._matched_text is MatchedText.DROPPED else 0
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _fallbacks(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its end."""
    lengths = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = lengths[length - 1]
        if text[index] == text[length]:
            length += 1
        lengths[index] = length
    return lengths
