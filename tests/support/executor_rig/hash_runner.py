"""What the simulated runner must draw, computed without rows and blocks; and that runner with switches to break it."""

import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from paceline_executor.runner.drafter import PromptLookup
from paceline_executor.runner.interface import FlatBatch, Int32Array, RowProblem, StepOutput, UInt64Array
from paceline_executor.runner.simulated import HASH_BASE, SimulatedRunner, nearest_left
from paceline_executor.runner.step_times import StepTimeCurve

_MASK = (1 << 64) - 1
_ANY: Set[int] = frozenset()
_ONE_US = StepTimeCurve(((1, 1000.0), (64, 1000.0)))


@dataclass(frozen=True, slots=True)
class HashRule:
    """Tokens come of a hash of all that is before, the seed and the offset.

    `drawn`: from which tokens, if not from all. `end_token_ids`, if there are any, come with `end_probability` alone:
    then it is the first of them. Rules of different `salt` draw different tokens, as processes do whose arithmetic
    differs.
    """

    vocab_size: int
    end_token_ids: tuple[int, ...] = ()
    end_probability: float = 0.0
    salt: int = 0
    drawn: range | None = None

    @property
    def is_plain(self) -> bool:
        """The simulated runner draws so by itself."""
        return not self.end_token_ids and not self.salt

    def next_token(self, context: Sequence[int], seed: int, offset: int) -> int:
        """What a row must produce if every slot was read as it was written."""
        return self._after(_hash_of(context), seed, offset)

    def output(
        self, prompt: Sequence[int], max_tokens: int, seed: int, end_token_ids: Sequence[int] = (), min_tokens: int = 0
    ) -> list[int]:
        output: list[int] = []
        hashed = _hash_of(prompt)
        for position in range(len(prompt), len(prompt) + max_tokens):
            token_id = self._after(hashed, seed, len(output))
            if len(output) < min_tokens:
                token_id = nearest_left(token_id, _ANY, set(end_token_ids), self.vocab_size)
            output.append(token_id)
            if token_id in end_token_ids:
                break
            hashed += (token_id + 1) * _factor(position)
        return output

    def token_of(self, mixed: int) -> int:
        if self.salt:
            mixed = _mix(mixed ^ self.salt)
        drawn = self.drawn or range(self.vocab_size)
        token_id = drawn[mixed % len(drawn)]
        if not self.end_token_ids:
            return token_id
        if _mix(mixed) < self.end_probability * 2**64:
            return self.end_token_ids[0]
        return nearest_left(token_id, _ANY, set(self.end_token_ids), self.vocab_size)

    def _after(self, hashed: int, seed: int, offset: int) -> int:
        noise = _mix((seed + offset * HASH_BASE) & _MASK)
        return self.token_of(_mix((hashed & _MASK) ^ noise))


def next_token(context: Sequence[int], seed: int, offset: int, vocab_size: int) -> int:
    return HashRule(vocab_size).next_token(context, seed, offset)


def continuation(prompt: Sequence[int], num_tokens: int, drawn: int | range, seed: int = 0) -> list[int]:
    """`drawn`: from which tokens, or the size of the vocabulary."""
    tokens = range(drawn) if isinstance(drawn, int) else drawn
    return HashRule(tokens.stop, drawn=tokens).output(prompt, num_tokens, seed)


class HashRunner(SimulatedRunner):
    """Takes no time.

    `rule`: how tokens are drawn, if not plainly. `fail_next` lets the next step raise that error; `faulty_tokens` makes
    a row fail alone whose last token is one of them, `problems` do it to batch rows of the next step; a cleared `gate`
    holds steps up, one that `closes` lets one through. `step_times` are told, and pass at once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        rule: HashRule | None = None,
        step_times: StepTimeCurve = _ONE_US,
    ) -> None:
        self.rule = rule or HashRule(vocab_size)
        super().__init__(
            num_blocks,
            block_size,
            vocab_size,
            drawn=self.rule.drawn,
            step_times=step_times,
            clock_ns=lambda: 0,
            sleep=lambda _: None,
        )
        self.draft_by(PromptLookup())
        self.fail_next: Exception | None = None
        self.faulty_tokens: frozenset[int] = frozenset()
        self.problems: dict[int, RowProblem] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.closes = False
        self.num_steps = 0

    def begin_step(self) -> tuple[Exception | None, dict[int, RowProblem]]:
        """Waits for the gate; returns what is to go wrong."""
        self.gate.wait()
        if self.closes:
            self.gate.clear()
        error, self.fail_next = self.fail_next, None  # before the step counts: what is set then is the next one's
        problems, self.problems = self.problems, {}
        self.num_steps += 1
        return error, problems

    def compute(self, batch: FlatBatch) -> StepOutput:
        error, problems = self.begin_step()
        output = super().compute(batch)
        if error is not None:
            raise error
        if self.faulty_tokens:
            last_tokens = batch.token_ids[batch.cu_seqlens[batch.sampled + 1] - 1]
            faulty = batch.sampled[np.isin(last_tokens, list(self.faulty_tokens))].tolist()
            problems |= dict.fromkeys(faulty, RowProblem.NOT_FINITE)
        return _with_problems(batch, output, problems) if problems else output

    def _tokens_of(self, hashes: UInt64Array) -> Int32Array:
        if self.rule.is_plain:
            return super()._tokens_of(hashes)
        return np.array([self.rule.token_of(mixed) for mixed in hashes.tolist()], dtype=np.int32)


def _with_problems(batch: FlatBatch, output: StepOutput, problems: Mapping[int, RowProblem]) -> StepOutput:
    """These batch rows failed alone, the others have a token each."""
    is_faulty = np.isin(batch.sampled, list(problems))
    is_kept = np.repeat(~is_faulty, output.num_accepted)
    return replace(
        output,
        num_accepted=np.where(is_faulty, 0, output.num_accepted).astype(np.int32),
        token_ids=output.token_ids[is_kept],
        logprobs=output.logprobs and output.logprobs.where(is_kept),
        problems={**output.problems, **problems},
    )


def _hash_of(token_ids: Sequence[int]) -> int:
    return sum((token_id + 1) * _factor(position) for position, token_id in enumerate(token_ids))


@cache
def _factor(position: int) -> int:
    return pow(HASH_BASE, position, 1 << 64)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
