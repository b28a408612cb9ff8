"""What a row's rules are: made ready once when the row is placed, and kept by whoever draws its tokens.

Refuses to know where they come from, and the arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Int32Array = npt.NDArray[np.int32]
_Float32Array = npt.NDArray[np.float32]

NO_TOKENS: _Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RowRules:
    allowed: _Int32Array
    biased: _Int32Array
    biases: _Float32Array  # [num_biased]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    forbidden: _Int32Array  # bad words of one token
    bad_words: Mapping[tuple[int, ...], _Int32Array]  # longer ones: their last tokens, by the tokens before
    bad_word_lens: tuple[int, ...]  # before the last token, each length once
    min_tokens: int
    end_token_ids: _Int32Array  # forbidden before min_tokens
    prompt: _Int32Array  # each token once, where they are penalised

    @property
    def has_penalties(self) -> bool:
        """Earlier tokens count."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def needs_output(self) -> bool:
        """It counts which tokens were drawn, not only how many."""
        return self.has_penalties or bool(self.bad_words)

    @property
    def is_permanent(self) -> bool:
        """It has more than min_tokens."""
        return bool(
            self.allowed.size or self.biased.size or self.forbidden.size or self.bad_words or self.has_penalties
        )

    @property
    def words(self) -> tuple[tuple[int, ...], ...]:
        longer = ((*before, last) for before, lasts in self.bad_words.items() for last in lasts.tolist())
        return (*((token_id,) for token_id in self.forbidden.tolist()), *longer)

    def forbidden_after(self, output: _Int32Array) -> _Int32Array:
        parts = [self.forbidden]
        if output.size < self.min_tokens:
            parts.append(self.end_token_ids)
        if self.bad_words:
            tail = tuple(output[-self.bad_word_lens[-1] :].tolist())
            parts += [self.bad_words.get(tail[-size:], NO_TOKENS) for size in self.bad_word_lens if size <= len(tail)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
