"""The text to predict: English prose that every Python brings along, and its tokens in windows.

Knows where the prose is and how it is cut. It refuses to know models.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

from tokenizers import Tokenizer

from paceline_executor.weights import TokenizerBundle


@dataclass(frozen=True, slots=True)
class Sample:
    """The first tokens of a text, and the SHA-256, in hex, of the UTF-8 of the part that they stand for."""

    token_ids: tuple[int, ...]
    sha256: str


def prose() -> str:
    """The paragraphs of Python's language reference, each once, in the order of its topics' names.

    Grammar, code, headings and lists are left out: a paragraph begins with a capital letter, is not indented, and ends
    with a full stop. The text changes a little with Python's version.
    """
    paragraphs = [found for name in sorted(topics) for found in re.split(r"\n\s*\n", topics[name])]
    return "\n\n".join(dict.fromkeys(" ".join(each.split()) for each in paragraphs if _is_prose(each)))


def take(text: str, bundle: TokenizerBundle, num_tokens: int) -> Sample:
    """The first `num_tokens` tokens of the text, or all where it has fewer."""
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json.decode())
    encoding = tokenizer.encode(text, add_special_tokens=False)
    token_ids = tuple(encoding.ids[:num_tokens])
    end = max((end for _, end in encoding.offsets[:num_tokens]), default=0)
    return Sample(token_ids, hashlib.sha256(text[:end].encode()).hexdigest())


def windows(token_ids: Sequence[int], size: int, first: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """The tokens in windows of `size`, the last one with what is left: all of them, in order, none twice.

    first: the tokens that every window begins with, within its size.
    """
    step = size - len(first)
    return [(*first, *token_ids[start : start + step]) for start in range(0, len(token_ids), step)]


def first_tokens(bundle: TokenizerBundle) -> tuple[int, ...]:
    """What the model wants in front of a text."""
    return bundle.prefix_token_ids


def _is_prose(paragraph: str) -> bool:
    return paragraph[:1].isupper() and "\n " not in paragraph and paragraph.rstrip().endswith(".")
