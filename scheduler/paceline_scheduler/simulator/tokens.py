"""The simulated model: the next token is a hash of every token before it.

A token that is lost, doubled, out of order or read from another request's block therefore changes all that follow.
Knows neither blocks nor rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from paceline.plan.values import Int32Array, TokenLogprobs, UInt64Array

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class TokenRule:
    """What is drawn from. `end_probability` is the chance that a token is the row's first end token."""

    vocab_size: int = 32_000
    end_probability: float = 0.0

    def next_token(
        self, context: Int32Array, seed: int, offset: int, end_token_ids: Sequence[int], min_tokens: int = 0
    ) -> int:
        """Return the token at output index `offset`; `context` is the prompt and the output before it.

        None of the first `min_tokens` is an end token.
        """
        drawn = _mix(_context_hash(context) ^ _mix(seed & _MASK) ^ _mix(offset + 1))
        if offset >= min_tokens and end_token_ids and _mix(drawn) < self.end_probability * 2**64:
            return end_token_ids[0]
        token = drawn % self.vocab_size
        while token in end_token_ids:
            token = (token + 1) % self.vocab_size
        return token

    def logprobs(self, token_id: int, offset: int, num_logprobs: int) -> TokenLogprobs:
        """Return made-up log-probabilities that depend only on the token and its offset."""
        best = -float(_mix(token_id * 31 + offset) % 1024) / 1024.0  # the same in single precision
        top = tuple(((token_id + rank) % self.vocab_size, best - rank) for rank in range(num_logprobs))
        return TokenLogprobs(token_id, best, top)


@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """How many tokens a row with drafts gets in a step: any number from none to one more than its drafts."""

    seed: int = 0

    def num_tokens(self, step: int, row: int, num_drafts: int) -> int:
        """Return how many tokens it gets in the step of this number; without drafts it is always one."""
        return _mix(_mix(self.seed) ^ _mix(step) ^ row) % (num_drafts + 2) if num_drafts else 1


def reference_output(
    prompt_token_ids: Sequence[int] | Int32Array,
    seed: int,
    max_tokens: int,
    rule: TokenRule,
    end_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> tuple[int, ...]:
    """Return what a request must generate, computed without blocks, rows or steps."""
    context = np.zeros(len(prompt_token_ids) + max_tokens, dtype=np.int32)
    num_prompt = len(prompt_token_ids)
    context[:num_prompt] = prompt_token_ids
    for offset in range(max_tokens):
        length = num_prompt + offset
        context[length] = rule.next_token(context[:length], seed, offset, end_token_ids, min_tokens)
        if int(context[length]) in end_token_ids:
            return tuple(context[num_prompt : length + 1].tolist())
    return tuple(context[num_prompt:].tolist())


def _mix(value: int) -> int:
    """Return the splitmix64 finaliser of a 64-bit number."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _context_hash(context: Int32Array) -> int:
    """Return a hash in which every position counts with a factor of its own, so that order matters."""
    factors = _factors(len(context).bit_length())[: len(context)]
    ids = context.astype(np.uint64) + np.uint64(1)
    return int((ids * factors).sum(dtype=np.uint64))


@lru_cache(maxsize=32)
def _factors(num_bits: int) -> UInt64Array:
    """Return odd 64-bit factors for the positions below 2^num_bits."""
    positions = np.arange(1, (1 << num_bits) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    mixed = (positions ^ (positions >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> np.uint64(32))) | np.uint64(1)
