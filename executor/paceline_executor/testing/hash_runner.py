"""What the simulated runner must draw, computed without rows and blocks; and that runner with switches to break it."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline_executor.runner.interface import RowProblem, StepBatch, StepOutput
from paceline_executor.runner.simulated import HASH_BASE, SimulatedRunner

_MASK = (1 << 64) - 1


def next_token(context: Sequence[int], seed: int, offset: int, vocab_size: int) -> int:
    """The token that follows these ids: what a row must produce if every slot was read as it was written."""
    return _drawn(_hash_of(context), seed, offset, range(vocab_size))


def continuation(prompt: Sequence[int], num_tokens: int, drawn: int | range, seed: int = 0) -> list[int]:
    """The output a prompt must give, of tokens from `drawn`, or of a vocabulary of that size."""
    tokens, hashed = list(prompt), _hash_of(prompt)
    for offset in range(num_tokens):
        tokens.append(_drawn(hashed, seed, offset, range(drawn) if isinstance(drawn, int) else drawn))
        hashed += (tokens[-1] + 1) * pow(HASH_BASE, len(tokens) - 1, 1 << 64)
    return tokens[len(prompt) :]


class HashRunner(SimulatedRunner):
    """The simulated runner without time, for tests.

    `fail_next` lets the next step raise that error; `faulty_tokens` makes a row fail alone whose last token is one of
    them; a cleared `gate` holds steps up.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size, clock_ns=lambda: 0)
        self.fail_next: Exception | None = None
        self.faulty_tokens: frozenset[int] = frozenset()
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0

    def launch(self, batch: StepBatch) -> StepOutput:
        """The step, if nothing holds it up or makes it fail after it was computed."""
        self.gate.wait()
        self.num_steps += 1
        output = super().launch(batch)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        output = replace(output, forward_ns=1000, sample_ns=100)
        return self._without_faulty(batch, output) if self.faulty_tokens else output

    def _without_faulty(self, batch: StepBatch, output: StepOutput) -> StepOutput:
        last_tokens = batch.token_ids[batch.cu_seqlens[batch.sampled + 1] - 1]
        is_faulty = np.isin(last_tokens, list(self.faulty_tokens))
        is_kept = ~is_faulty[output.num_accepted == 1]
        return replace(
            output,
            num_accepted=np.where(is_faulty, 0, output.num_accepted).astype(np.int32),
            token_ids=output.token_ids[is_kept],
            logprobs=output.logprobs and output.logprobs.where(is_kept),
            problems={**output.problems, **dict.fromkeys(batch.sampled[is_faulty].tolist(), RowProblem.NOT_FINITE)},
        )


def _hash_of(token_ids: Sequence[int]) -> int:
    return sum((token_id + 1) * pow(HASH_BASE, position, 1 << 64) for position, token_id in enumerate(token_ids))


def _drawn(hashed: int, seed: int, offset: int, tokens: range) -> int:
    noise = _mix((seed + offset * HASH_BASE) & _MASK)
    return tokens[_mix((hashed & _MASK) ^ noise) % len(tokens)]


def _mix(value: int) -> int:
    """The splitmix64 finaliser of a 64-bit number."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
