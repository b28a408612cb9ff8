"""The text of one completion: its tokens' characters, cut where a stop text is found.

Joins detokeniser and stop texts, and keeps which token completed a match. What comes out is a function of the tokens so
far, however they were grouped.
"""

from dataclasses import dataclass

from paceline_scheduler.api.detokenizer import Detokenizer
from paceline_scheduler.api.stop_texts import StopScanner


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop text was found; `num_tokens` of the tokens just given belong to the output, the last one completed it."""

    stop_text: str
    num_tokens: int


class CompletionText:
    """The text side of one completion. After a match nothing more may be given."""

    __slots__ = ("_detokenizer", "_scanner")

    def __init__(self, detokenizer: Detokenizer, stop_texts: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stop_texts) if stop_texts else None

    def take(self, token_ids: list[int]) -> tuple[str, StopMatch | None]:
        """Return the text that can be shown because of these tokens, and the match that ends the output, if any."""
        scanner = self._scanner
        if not token_ids:
            return "", None
        if scanner is None:
            return self._detokenizer.take(token_ids), None
        pieces = []
        for number, token_id in enumerate(token_ids, start=1):
            text, stop_text = scanner.scan(self._detokenizer.take([token_id]))
            pieces.append(text)
            if stop_text is not None:
                return "".join(pieces), StopMatch(stop_text, number)
        return "".join(pieces), None

    def finish(self) -> tuple[str, str | None]:
        """Return what is left at the end of the output, and the stop text that it completes, if any."""
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return rest, None
        text, stop_text = self._scanner.scan(rest)
        return (text, stop_text) if stop_text is not None else (text + self._scanner.flush(), None)
