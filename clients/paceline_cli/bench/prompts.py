"""The content of prompts: which symbol stands where. A target says what its symbols are, ids or words.

Knows how content follows from a seed. Refuses to know vocabularies.
"""

import random
from collections.abc import Iterable, Iterator

from paceline_cli.bench.workload import Segment

# Serial numbers up to here make prompts differ for certain, beyond it almost surely.
_MAX_SERIAL = 2**31


class PromptWriter:
    """Writes prompts as numbers in `[0, num_symbols)`. The same seed writes the same prompts."""

    def __init__(self, num_symbols: int, seed: int) -> None:
        self._symbols = range(num_symbols)
        self._seed = seed
        self._num_digits = sum(1 for _ in _digits(_MAX_SERIAL, num_symbols))

    def write(self, segments: Iterable[Segment]) -> list[int]:
        prompt: list[int] = []
        for segment in segments:
            prompt += self._content(segment)
        return prompt

    def _content(self, segment: Segment) -> list[int]:
        draws = random.Random(f"{self._seed} {segment.key}")  # noqa: S311  repeatable, not secret
        content = draws.choices(self._symbols, k=segment.num_tokens)
        if segment.serial is not None:
            # The lowest digit first: already the first token tells as many prompts apart as there are symbols.
            digits = [*_digits(segment.serial, len(self._symbols)), *[0] * self._num_digits][: self._num_digits]
            content[: len(digits)] = digits[: len(content)]
        return content


def _digits(number: int, base: int) -> Iterator[int]:
    while number:
        number, digit = divmod(number, base)
        yield digit
