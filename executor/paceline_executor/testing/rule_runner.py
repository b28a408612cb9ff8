"""A runner without a model for the simulation, which draws by a rule that is handed in: other processes draw otherwise.

It keeps token ids in its KV slots and reads them there.
The next token is a hash of the ids read through the row's block table, the seed and the offset, so a lost, doubled or
reordered token, or a block wrongly reused, changes every token after it. Knows arrays only, like any runner.
"""

import hashlib
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_executor.runner.interface import (
    Int32Array,
    KvGeometry,
    RowProblem,
    StepBatch,
    StepHandle,
    StepOutput,
    TokenLists,
    output_of,
)
from paceline_executor.runner.simulated import logprobs_of, prompt_logprobs_of

_EMPTY_SLOT = -1


@dataclass(frozen=True, slots=True)
class HashRule:
    """How tokens are drawn: by a hash of all that comes before, the seed and the offset.

    `end_token_ids`, if there are any, come with `end_probability` alone: then it is the first of them. Rules of
    different `salt` draw different tokens, as processes do whose arithmetic differs.
    """

    vocab_size: int
    end_token_ids: tuple[int, ...] = ()
    end_probability: float = 0.0
    salt: int = 0

    def next_token(self, context: Sequence[int], seed: int, offset: int) -> int:
        """The token that follows these ids: what a row must produce if every slot was read as it was written."""
        words = np.asarray([*context, offset], dtype=np.int64).tobytes() + (seed ^ self.salt).to_bytes(8, "little")
        token_id = _hash(words) % self.vocab_size
        if not self.end_token_ids:
            return token_id
        if _hash(b"end" + words) < self.end_probability * 2**32:
            return self.end_token_ids[0]
        while token_id in self.end_token_ids:
            token_id = (token_id + 1) % self.vocab_size
        return token_id


def _hash(words: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(words, digest_size=4).digest(), "little")


def reference_output(rule: HashRule, prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """The output a prompt must give, whatever ends it, computed without rows and blocks."""
    tokens = list(prompt)
    for offset in range(num_tokens):
        tokens.append(rule.next_token(tokens, seed, offset))
    return tokens[len(prompt) :]


def nearest_left(token_id: int, allowed: Set[int], forbidden: Set[int], vocab_size: int) -> int | None:
    """The first of this token and those after it that masks leave, around the vocabulary; None if none is.

    No token is allowed alone: all are.
    """
    for step in range(vocab_size):
        candidate = (token_id + step) % vocab_size
        if candidate not in forbidden and (candidate in allowed or not allowed):
            return candidate
    return None


class RuleRunner:
    """A Runner whose tokens prove that the right slots were written and read.

    Of a row's rules it acts on masks, by taking the next token id that is left; it has no logits to change.
    `fail_next` lets the next step raise that error; `faulty_tokens` makes a row fail alone whose last token is one of
    them; a cleared `gate` holds steps up. `rule`: how tokens are drawn, if not plainly.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, rule: HashRule | None = None) -> None:
        self.rule = rule or HashRule(vocab_size)
        self._slots = np.full((num_blocks, block_size), _EMPTY_SLOT, dtype=np.int64)
        self.fail_next: Exception | None = None
        self.faulty_tokens: frozenset[int] = frozenset()
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0

    @property
    def max_in_flight(self) -> int:
        """It computes in `launch`."""
        return 1

    @property
    def kv_geometry(self) -> KvGeometry:
        """One layer with one head of one dimension: a token id."""
        num_blocks, block_size = self._slots.shape
        return KvGeometry(num_blocks, block_size, 1, 1, 1, block_size * 8)

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        """There is nothing to warm up."""
        return ((1, 1000), (64, 2000))

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        """Copy whole blocks."""
        self._slots[destinations] = self._slots[sources]

    def is_done(self, handle: StepHandle) -> bool:
        """It is when it is launched."""
        return output_of(handle) is handle

    def wait(self, handle: StepHandle) -> StepOutput:
        """The output is its handle."""
        return output_of(handle)

    def launch(self, batch: StepBatch) -> StepOutput:
        """Write the batch's ids into their slots, then draw from what each sampled row's table leads to."""
        self.gate.wait()
        self._write(batch)
        self.num_steps += 1
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        drawn = [self._draw(batch, index) for index in range(batch.sampled.size)]
        problems = {
            int(row): RowProblem.NOTHING_LEFT
            for row, token_id in zip(batch.sampled, drawn, strict=True)
            if token_id is None
        }
        problems |= {
            int(row): RowProblem.NOT_FINITE
            for row in batch.sampled
            if int(batch.token_ids[batch.cu_seqlens[row + 1] - 1]) in self.faulty_tokens
        }
        accepted = zip(batch.sampled.tolist(), drawn, strict=True)
        token_ids = [token_id for row, token_id in accepted if token_id is not None and row not in problems]
        num_top = int(batch.sampling.num_logprobs.max(initial=-1))
        return StepOutput(
            num_accepted=np.array([row not in problems for row in batch.sampled.tolist()], dtype=np.int32),
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=logprobs_of(token_ids, num_top) if num_top >= 0 else None,
            problems=problems,
            forward_ns=1000,
            sample_ns=100,
            prompt_logprobs=prompt_logprobs_of(batch),
        )

    def _write(self, batch: StepBatch) -> None:
        if not np.array_equal(batch.positions[batch.cu_seqlens[1:] - 1], batch.context_lens - 1):
            raise AssertionError("the last token of a batch row sits at the end of its context")
        if (batch.token_ids < 0).any():
            raise AssertionError("a token that is not known is computed")
        lines = np.repeat(np.arange(batch.context_lens.size), np.diff(batch.cu_seqlens))
        indices, places = np.divmod(batch.positions, self._slots.shape[1])
        self._slots[batch.block_tables[lines, indices], places] = batch.token_ids

    def _draw(self, batch: StepBatch, index: int) -> int | None:
        sampling = batch.sampling
        context = self._context(batch, int(batch.sampled[index])).tolist()
        token_id = self.rule.next_token(context, int(sampling.seeds[index]), int(sampling.offsets[index]))
        if sampling.rules is None:
            return token_id
        allowed, forbidden = (_listed(lists, index) for lists in (sampling.rules.allowed, sampling.rules.forbidden))
        return nearest_left(token_id, allowed, forbidden, self.rule.vocab_size)

    def _context(self, batch: StepBatch, row: int) -> npt.NDArray[np.int64]:
        """The token ids that a batch row's block table leads to."""
        num_tokens = int(batch.context_lens[row])
        num_blocks = -(-num_tokens // self._slots.shape[1])
        read: npt.NDArray[np.int64] = self._slots[batch.block_tables[row, :num_blocks]].reshape(-1)[:num_tokens]
        return read


def _listed(lists: TokenLists, index: int) -> set[int]:
    return set(lists.token_ids[lists.cu_lens[index] : lists.cu_lens[index + 1]].tolist())
