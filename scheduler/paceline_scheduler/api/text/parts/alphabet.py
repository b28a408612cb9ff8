"""Marks that are tokens, as letters that no text has.

A token of the vocabulary's own for a mark, such as `<tool_call>`, counts as the mark, and the same letters never do. In
what is cut it is one half of a surrogate pair, which decoded text never holds.
"""

from collections.abc import Iterable, Mapping

_FIRST = 0xD800
_MAX_TOKENS = 64


class Alphabet:
    """`tokens` are the texts of tokens that are no words, by id; those of them that `letters` hold are marks."""

    def __init__(self, tokens: Mapping[int, str], letters: Iterable[str]) -> None:
        all_letters = "\0".join(letters)
        marks = [(text, token_id) for token_id, text in tokens.items() if text.strip() and text in all_letters]
        longest_first = sorted(marks, key=lambda mark: (-len(mark[0]), mark))[:_MAX_TOKENS]
        self._marks = {text: chr(_FIRST + number) for number, (text, _) in enumerate(longest_first)}
        self.by_token = {token_id: self._marks[text] for text, token_id in longest_first}
        self._texts = {ord(mark): text for text, mark in self._marks.items()}

    def write(self, text: str) -> str:
        for spelt, mark in self._marks.items():
            text = text.replace(spelt, mark)
        return text

    def spell(self, text: str) -> str:
        """The text for a reader."""
        return text if text.isascii() else text.translate(self._texts)
