"""From token ids to text, a few at a time, and never half a character.

Equals the tokenizers library's `decode` of the whole output, with one exception. Where byte tokens (`<0xE2>`) make up
no valid UTF-8, the library also destroys the characters beside them; here they stay and the bytes become U+FFFD as
Unicode recommends (one per maximal subpart), which can be emitted before the run has ended.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from paceline.plan.plain_tokenizer import MAX_TOKEN_ID
from paceline_scheduler.errors import UnsupportedError

_SPACE_LETTER = "\u2581"


@dataclass(frozen=True, slots=True)
class Spelling:
    """`num_stripped_spaces` leading spaces of a text, which begins with its prompt, are no part of it. `added_ids` are
    tokens that no text is merged to: special ones, and marks such as `<tool_call>`.
    """

    token_bytes: tuple[bytes, ...]  # [vocab_size]
    token_bytes_without_special: tuple[bytes, ...]  # [vocab_size], special tokens empty
    num_stripped_spaces: int
    added_ids: frozenset[int] = frozenset()

    @property
    def added(self) -> dict[int, str]:
        return {token_id: self.token_bytes[token_id].decode("utf-8", "replace") for token_id in self.added_ids}

    def table(self, skip_special_tokens: bool) -> tuple[bytes, ...]:
        return self.token_bytes_without_special if skip_special_tokens else self.token_bytes

    def decode(self, token_ids: list[int], skip_special_tokens: bool, before: Iterable[int] = ()) -> str:
        detokenizer = Detokenizer(self, skip_special_tokens, before)
        return detokenizer.take(token_ids) + detokenizer.flush()


class Detokenizer:
    """O(1) per token: only the bytes of an unfinished character are kept."""

    __slots__ = ("_num_spaces_to_strip", "_pending", "_table")

    def __init__(self, spelling: Spelling, skip_special_tokens: bool, before: Iterable[int] = ()) -> None:
        """`before` are the tokens that precede, such as a prompt's: only a text's own beginning loses spaces."""
        self._table = spelling.table(skip_special_tokens)
        self._pending = b""
        self._num_spaces_to_strip = spelling.num_stripped_spaces
        for token_id in before if self._num_spaces_to_strip else ():
            spelt = self._table[token_id]
            self._num_spaces_to_strip -= len(spelt)
            if spelt.strip(b" ") or self._num_spaces_to_strip <= 0:
                self._num_spaces_to_strip = 0
                break

    def take(self, token_ids: list[int]) -> str:
        table = self._table
        raw = self._pending + (table[token_ids[0]] if len(token_ids) == 1 else b"".join([table[i] for i in token_ids]))
        text, num_used = codecs.utf_8_decode(raw, "replace", False)
        self._pending = raw[num_used:]
        return self._strip(text) if self._num_spaces_to_strip and text else text

    def flush(self) -> str:
        """U+FFFD stands for a character that stayed unfinished."""
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")

    def _strip(self, text: str) -> str:
        num_stripped = 0
        while num_stripped < min(self._num_spaces_to_strip, len(text)) and text[num_stripped] == " ":
            num_stripped += 1
        # Spaces may go on with the next tokens.
        self._num_spaces_to_strip = self._num_spaces_to_strip - num_stripped if num_stripped == len(text) else 0
        return text[num_stripped:]


def read_spelling(tokenizer: Tokenizer, vocab_size: int) -> Spelling:
    """Ids without a token spell nothing. Raises UnsupportedError for an unknown decoder, and for far too high ids."""
    spell, num_stripped_spaces = _spelling_rule(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    special_ids = {token_id for token_id, token in added.items() if token.special}
    spelled = {token_id: spell(token) for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    highest = max(spelled, default=0)
    if highest > MAX_TOKEN_ID:
        sentence = f"the tokenizer has a token of id {highest}, the highest that is taken is {MAX_TOKEN_ID}"
        raise UnsupportedError("tokenizer_json", sentence)
    token_bytes = [spelled.get(token_id, b"") for token_id in range(max(vocab_size, highest + 1))]
    without_special = list(token_bytes)
    for token_id in special_ids:
        without_special[token_id] = b""
    return Spelling(tuple(token_bytes), tuple(without_special), num_stripped_spaces, frozenset(added))


def _spelling_rule(tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], int]:
    """Returns how a token becomes bytes, and how many leading spaces an output loses."""
    # The library shows a decoder's parameters only as JSON.
    decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    stages = list(_stages(decoder))
    kinds = tuple(stage["type"] for stage in stages)
    if kinds == ("ByteLevel",):
        return _byte_level_spelling, 0
    if kinds[:3] == ("Replace", "ByteFallback", "Fuse") and kinds[3:] in ((), ("Strip",)):
        replace, strip = stages[0], (stages[3:] or [{"content": " ", "start": 0, "stop": 0}])[0]
        replaces_spaces = replace["pattern"] == {"String": _SPACE_LETTER} and replace["content"] == " "
        if replaces_spaces and strip["content"] == " " and strip["stop"] == 0:
            return _byte_fallback_spelling, int(strip["start"])
    shown = "+".join(kinds) or "none"
    raise UnsupportedError("tokenizer.decoder", f"this version cannot stream the text of the model's decoder: {shown}")


def _stages(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for stage in decoder["decoders"]:
            yield from _stages(stage)
    else:
        yield decoder


def _byte_level_spelling(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode()


def _byte_fallback_spelling(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE_LETTER, " ").encode()


def _byte_letters() -> dict[str, int]:
    """Printable bytes stand for themselves, others become letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()
