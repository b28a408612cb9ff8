"""Stop texts in streamed output: what may become one is held back, what is one ends the output.

Knows characters only, not tokens. What is let through is a function of the text so far, however it arrives.

Which stop text wins: the one that is complete first. Where several are complete at the same character, the longest,
which starts first. The output ends before it.
"""


class _Candidate:
    """One stop text, and how many of its characters the text so far ends with (Knuth, Morris and Pratt's automaton)."""

    __slots__ = ("_fallbacks", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallbacks = _fallbacks(text)

    def advance(self, piece: str) -> int | None:
        """Take more text; returns how many of its characters complete the stop text, or None if they do not."""
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


class StopScanner:
    """The stop texts of one completion. At most the longest of them, less one character, is held back."""

    __slots__ = ("_candidates", "_first_letters", "_held")

    def __init__(self, stop_texts: tuple[str, ...]) -> None:
        self._candidates = [_Candidate(text) for text in stop_texts]
        self._first_letters = frozenset(text[0] for text in stop_texts)
        self._held = ""

    def scan(self, piece: str) -> tuple[str, str | None]:
        """Take the next piece; returns the text that it lets through, and the stop text that ends the output, if any.

        After a stop text was found nothing more may be given.
        """
        if not self._held and self._first_letters.isdisjoint(piece):
            # No stop text has begun, and none begins here: the usual case.
            return piece, None
        found = [
            (end, candidate.text) for candidate in self._candidates if (end := candidate.advance(piece)) is not None
        ]
        text = self._held + piece
        if found:
            end, stop_text = min(found, key=lambda stop: (stop[0], -len(stop[1])))
            return text[: len(self._held) + end - len(stop_text)], stop_text
        num_let_through = len(text) - max(candidate.num_matched for candidate in self._candidates)
        self._held = text[num_let_through:]
        return text[:num_let_through], None

    def flush(self) -> str:
        """Return what was held back: the output is over, and it became no stop text."""
        held, self._held = self._held, ""
        return held


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
