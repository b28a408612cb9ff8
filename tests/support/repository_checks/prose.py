"""How much prose a package has: words of its docstrings and comments for every 100 lines of its files.

Knows the bound of each package. What stands below an attribute counts as a docstring; words are what blanks separate.
"""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from repository_checks.sources import Source

MAX_WORDS: Mapping[str, int] = {
    "paceline": 133,
    "paceline_scheduler": 90,
    "paceline_executor": 113,
    "paceline_kernels": 187,
    "paceline_client": 144,
    "paceline_cli": 115,
}
"""The bound of each package, in words for every 100 lines: what was measured last. It is lowered, never raised."""


def words_per_100_lines(sources: Iterable[Source]) -> dict[str, int]:
    """Return how much prose each package has of which there is a source, rounded up."""
    num_words, num_lines = Counter[str](), Counter[str]()
    for source in sources:
        num_words[source.package] += count_words(source)
        num_lines[source.package] += len(source.text.splitlines())
    return {package: -(-100 * num_words[package] // max(1, num_lines[package])) for package in num_lines}


def count_words(source: Source) -> int:
    """Return how many words the docstrings and comments of a file have."""
    return sum(len(text.split()) for text in (*_docstrings(source), *_comments(source)))


def too_wordy(sources: Iterable[Source], bounds: Mapping[str, int]) -> list[str]:
    """Return a sentence for each package that is above its bound, or has none."""
    return [
        f"{package} has {num_words} words of prose for every 100 lines, the limit is {bounds.get(package, 0)}:"
        " cut what the code says itself"
        for package, num_words in words_per_100_lines(sources).items()
        if num_words > bounds.get(package, 0)
    ]


def _docstrings(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def _comments(source: Source) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#")
