"""Names of special tokens in the texts of a chat, such as `<|im_end|>` in what a user wrote: they stay text.

A template may move and cut messages, so such a name is marked before it is rendered, and told by its mark from the
template's own when the chat is tokenised. Refuses to know templates.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

from tokenizers import Tokenizer

from paceline_scheduler.errors import InvalidRequestError

_T = TypeVar("_T")

# Noncharacters: Unicode keeps them for use inside of programs.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class SpecialTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        """Nobody else may use `tokenizer` meanwhile."""
        added = tokenizer.get_added_tokens_decoder().items()
        names = {token_id: token.content for token_id, token in added if token.special}
        spelt: list[list[int]] = [[] for _ in names]
        tokenizer.encode_special_tokens = True
        with suppress(Exception):  # it has no word for them and none for what is unknown: they are left out
            spelt = [text.ids for text in tokenizer.encode_batch(list(names.values()), add_special_tokens=False)]
        tokenizer.encode_special_tokens = False
        self._spelt = dict(zip(names, spelt, strict=True))
        longest_first = sorted(filter(None, names.values()), key=len, reverse=True)
        self._any_name = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def marked(self, chat: _T) -> tuple[_T, str]:
        """Return a chat, any value of JSON, with a mark behind the first character of each name in its texts and keys,
        and the mark; "" where there is none.

        Raises InvalidRequestError.
        """
        texts = "\n".join(_texts(chat))
        if not self._any_name.search(texts):
            return chat, ""
        mark = next((mark for mark in _MARKS if mark not in texts), None)
        if mark is None:
            raise InvalidRequestError(
                "chat", "holds names of special tokens and all of U+FDD0 to U+FDEF; leave out one of these"
            )
        return self._with_marks(chat, mark), mark

    def _with_marks(self, value: Any, mark: str) -> Any:  # noqa: ANN401 (JSON)
        match value:
            case str():
                return self._any_name.sub(lambda name: name[0][:1] + mark + name[0][1:], value)
            case dict():
                return {self._with_marks(key, mark): self._with_marks(each, mark) for key, each in value.items()}
            case list():
                return [self._with_marks(each, mark) for each in value]
        return value

    def encode(self, tokenizer: Tokenizer, rendered: str, mark: str) -> list[int]:
        """Marked names are spelt out. A tokenizer that begins each piece of text with a space does so behind them."""
        pieces = rendered.split(mark)
        begins, length = set(), 0
        for piece in pieces[:-1]:
            length += len(piece)
            begins.add(length - 1)
        (encoded,) = tokenizer.encode_batch(["".join(pieces)], add_special_tokens=False)
        token_ids: list[int] = []
        for token_id, place in zip(encoded.ids, encoded.offsets, strict=True):
            is_text = token_id in self._spelt and not begins.isdisjoint(range(*place))
            token_ids += self._spelt[token_id] if is_text else (token_id,)
        return token_ids


def _texts(value: Any) -> Iterator[str]:  # noqa: ANN401 (JSON)
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case dict() as fields:
                left += (*fields, *fields.values())
            case list() as items:
                left += items
