"""The text of one completion, cut where a stop text is found.

It does not depend on how the tokens were grouped.
"""

from dataclasses import dataclass

from paceline_scheduler.api.text.detokenizer import Detokenizer
from paceline_scheduler.api.text.stop_texts import MatchedText, StopScanner


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`num_tokens` of the new tokens belong to the output; the last one completed the match."""

    stop_text: str
    num_tokens: int


class CompletionText:
    """After a match nothing more may be given.

    A stop text completed by one of the first `min_tokens` tokens is text.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_scanner", "matched_text")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_texts: tuple[str, ...],
        matched_text: MatchedText = MatchedText.DROPPED,
        min_tokens: int = 0,
    ) -> None:
        self.matched_text = matched_text
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stop_texts, matched_text) if stop_texts else None
        self._min_tokens = min_tokens
        self._num_tokens = 0  # counted only where stop texts are looked for

    def take(self, token_ids: list[int]) -> tuple[str, StopMatch | None]:
        """Returns the text that can be shown now, and the match that ends the output."""
        scanner = self._scanner
        if not token_ids:
            return "", None
        if scanner is None:
            return self._detokenizer.take(token_ids), None
        pieces = []
        for number, token_id in enumerate(token_ids, start=1):
            piece = self._detokenizer.take([token_id])
            self._num_tokens += 1
            if self._num_tokens <= self._min_tokens:
                pieces.append(scanner.pass_by(piece))
                continue
            text, stop_text = scanner.scan(piece)
            pieces.append(text)
            if stop_text is not None:
                return "".join(pieces), StopMatch(stop_text, number)
        return "".join(pieces), None

    def take_last(self, token_ids: list[int], stop_token_id: int | None) -> tuple[str, StopMatch | None]:
        """A stop token's text counts only where matched text is retained."""
        is_silent = self.matched_text is MatchedText.DROPPED and token_ids[-1:] == [stop_token_id]
        text, match = self.take(token_ids[:-1] if is_silent else token_ids)
        if match is None:
            rest, stop_text = self.finish()
            text += rest
            match = None if stop_text is None else StopMatch(stop_text, len(token_ids))
        return text, match

    def replay(self, token_ids: list[int], end_token_ids: tuple[int, ...]) -> tuple[StopMatch | None, int | None]:
        """The client has this output; returns the stop text or token that has ended it."""
        last = token_ids[-1] if token_ids else None
        if last not in end_token_ids or len(token_ids) <= self._min_tokens:
            return self.take(token_ids)[1], None
        match = self.take_last(token_ids, last)[1]
        return match, last if match is None else None

    def finish(self) -> tuple[str, str | None]:
        """Returns the rest of the text, and the stop text that it completes."""
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return rest, None
        if self._num_tokens <= self._min_tokens:
            return self._scanner.pass_by(rest) + self._scanner.flush(), None
        text, stop_text = self._scanner.scan(rest)
        return (text, stop_text) if stop_text is not None else (text + self._scanner.flush(), None)
