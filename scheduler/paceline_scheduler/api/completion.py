"""The text of one completion, cut where a stop text is found, and the parts of that text.

It does not depend on how the tokens were grouped.
"""

from collections import deque
from dataclasses import dataclass

from paceline_scheduler.api.text.detokenizer import Detokenizer
from paceline_scheduler.api.text.parts.cutter import PartCutter
from paceline_scheduler.api.text.parts.part import Part
from paceline_scheduler.api.text.stop_texts import MatchedText, StopScanner


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`num_tokens` of the new tokens belong to the output; the last one completed the match."""

    stop_text: str
    num_tokens: int


class _ShownParts:
    """Parts of what is shown: what may become a stop text waits, and what is dropped is no part."""

    def __init__(self, cutter: PartCutter) -> None:
        self.cutter = cutter
        self._waiting: deque[tuple[int | None, str]] = deque()  # tokens, and what they add to the text
        self._num_shown = 0  # of the characters that wait

    def take(self, token_id: int | None, piece: str, num_shown: int) -> None:
        """So many more characters are shown. The end of a text belongs to no token."""
        self._waiting.append((token_id, piece))
        self._num_shown += num_shown
        while self._waiting and len(self._waiting[0][1]) <= self._num_shown:
            token_id, piece = self._waiting.popleft()
            self._num_shown -= len(piece)
            if token_id is None:
                self.cutter.add(piece)
            else:
                self.cutter.take(token_id, piece)

    def finish(self) -> None:
        if self._waiting:
            self.cutter.add(self._waiting[0][1][: self._num_shown])
        self.cutter.finish()


class CompletionText:
    """After a match nothing more may be given.

    A stop text completed by one of the first `min_tokens` tokens is text.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_parts", "_scanner", "matched_text")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_texts: tuple[str, ...],
        matched_text: MatchedText = MatchedText.DROPPED,
        min_tokens: int = 0,
        parts: PartCutter | None = None,
    ) -> None:
        self.matched_text = matched_text
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stop_texts, matched_text) if stop_texts else None
        self._min_tokens = min_tokens
        self._parts = None if parts is None else _ShownParts(parts)
        self._num_tokens = 0  # counted only where stop texts are looked for

    @property
    def has_parts(self) -> bool:
        return self._parts is not None

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._parts is None else self._parts.cutter.num_reasoning_tokens

    def take_parts(self) -> list[Part]:
        """Returns what is new."""
        return [] if self._parts is None else self._parts.cutter.taken()

    def take(self, token_ids: list[int]) -> tuple[str, StopMatch | None]:
        """Returns the text that can be shown now, and the match that ends the output."""
        scanner, parts = self._scanner, self._parts
        if not token_ids:
            return "", None
        if scanner is None and parts is None:
            return self._detokenizer.take(token_ids), None
        pieces = []
        if scanner is None and parts is not None:
            for token_id in token_ids:
                piece = self._detokenizer.take([token_id])
                parts.cutter.take(token_id, piece)
                pieces.append(piece)
            return "".join(pieces), None
        assert scanner is not None, "there is one, or nothing else to do"
        for number, token_id in enumerate(token_ids, start=1):
            piece, stop_text = self._detokenizer.take([token_id]), None
            self._num_tokens += 1
            if self._num_tokens <= self._min_tokens:
                text = scanner.pass_by(piece)
            else:
                text, stop_text = scanner.scan(piece)
            pieces.append(text)
            if parts is not None:
                parts.take(token_id, piece, len(text))
            if stop_text is not None:
                if parts is not None:
                    parts.finish()
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
        rest, stop_text = self._detokenizer.flush(), None
        text = rest
        if self._scanner is not None:
            if self._num_tokens <= self._min_tokens:
                text = self._scanner.pass_by(rest)
            else:
                text, stop_text = self._scanner.scan(rest)
            if stop_text is None:
                text += self._scanner.flush()
        if self._parts is not None:
            self._parts.take(None, rest, len(text))
            self._parts.finish()
        return text, stop_text
