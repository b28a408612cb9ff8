"""Pieces of the parts of an output."""

import hashlib
import string
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's chat templates take no other


class PartKind(Enum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Part:
    """A piece; `text` of a call adds to its arguments. Calls are numbered by `index`, the first piece names them."""

    kind: PartKind
    text: str
    index: int = 0
    id: str = ""
    name: str = ""


def append_parts(parts: list[Part], later: Iterable[Part]) -> None:
    """Pieces that follow one another in the same part become one."""
    for part in later:
        last = parts[-1] if parts else None
        if last is not None and last.kind is part.kind and last.index == part.index and not part.id:
            last.text += part.text
        else:
            parts.append(part)


def call_id(request_id: str, completion: int, index: int) -> str:
    """The same whenever the call is told again."""
    named = f"{completion} {index} {request_id}".encode()
    number = int.from_bytes(hashlib.blake2b(named, digest_size=8, person=b"paceline-call").digest(), "big")
    letters = []
    for _ in range(_ID_LENGTH):
        number, rest = divmod(number, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[rest])
    return "".join(letters)
