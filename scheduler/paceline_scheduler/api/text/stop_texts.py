"""Stop texts in streamed output: what may become one is held back, what is one ends the output.

The result does not depend on how the text arrives. The stop text that is complete first wins; at the same character the
longest. The output ends before it, or behind it where it is to be included.
"""

from enum import Enum


class MatchedText(Enum):
    DROPPED = "dropped"
    INCLUDED = "included"


class _Candidate:
    """Counts how many of its characters end the text so far (Knuth, Morris and Pratt's automaton)."""

    __slots__ = ("_fallbacks", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallbacks = _fallbacks(text)

    def advance(self, piece: str) -> int | None:
        """Returns how many characters of the piece complete it, or None."""
        text, num_matched = self.text, self.num_matched
        # Most pieces hold nothing of most stop texts.
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
    """Holds back at most the longest stop text, less one character, and nothing where matched text is included."""

    __slots__ = ("_candidates", "_first_letters", "_held", "_matched_text", "_num_matched")

    def __init__(self, stop_texts: tuple[str, ...], matched_text: MatchedText = MatchedText.DROPPED) -> None:
        self._candidates = [_Candidate(text) for text in stop_texts]
        self._first_letters = frozenset(text[0] for text in stop_texts)
        self._matched_text = matched_text
        self._num_matched = 0  # longest beginning of a stop text that ends the text so far
        self._held = ""

    def scan(self, piece: str) -> tuple[str, str | None]:
        """Returns what may be shown, and the stop text that ends the output; then nothing more may be given."""
        if not self._num_matched and self._first_letters.isdisjoint(piece):
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
        """Returns what may be shown. A stop text that begins in the piece may be completed later."""
        for candidate in self._candidates:
            candidate.pass_by(piece)
        return self._let_through(piece)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _let_through(self, piece: str) -> str:
        self._num_matched = max(candidate.num_matched for candidate in self._candidates)
        text = self._held + piece
        num_held = self._num_matched if self._matched_text is MatchedText.DROPPED else 0
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _fallbacks(text: str) -> list[int]:
    """For each prefix, its longest proper prefix that is also its end."""
    lengths = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = lengths[length - 1]
        if text[index] == text[length]:
            length += 1
        lengths[index] = length
    return lengths
