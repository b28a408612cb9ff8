"""A runner without a model: it keeps token ids in its KV slots and draws tokens from what it reads there.

The next token is a hash of the ids read through the row's block table, the seed and the offset, so a lost, doubled or
reordered token, or a block wrongly reused, changes every token after it. Knows arrays only, like any runner.
"""

import hashlib
import threading
from collections.abc import Sequence

import numpy as np

from paceline_executor.runner.interface import (
    Int32Array,
    KvGeometry,
    LogitRuleColumns,
    PromptLogprobs,
    RowProblem,
    StepBatch,
    StepOutput,
    TokenLists,
    TokenLogprobs,
)

_EMPTY_SLOT = -1


def next_token(context: Sequence[int], seed: int, offset: int, vocab_size: int) -> int:
    """The token that follows these ids: what a row must produce if every slot was read as it was written."""
    words = np.asarray([*context, offset], dtype=np.int64).tobytes() + seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(words, digest_size=4).digest(), "little") % vocab_size


def continuation(prompt: Sequence[int], num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    """The output a prompt must give, computed without rows and blocks."""
    tokens = list(prompt)
    for offset in range(num_tokens):
        tokens.append(next_token(tokens, seed, offset, vocab_size))
    return tokens[len(prompt) :]


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """What is said of a drawn token: made up, and different for every token."""
    return TokenLogprobs(-token_id / 8, tuple(range(num_top)), tuple(-token_id - rank / 8 for rank in range(num_top)))


def prompt_logprobs_of(token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
    """What is said of prompt tokens: made up, as for those that are drawn."""
    values = [logprobs_of(int(token_id), num_top) for token_id in token_ids]
    return PromptLogprobs(
        logprobs=np.array([value.chosen for value in values], dtype=np.float32),
        top_token_ids=np.array([value.top_token_ids for value in values], dtype=np.int32).reshape(-1, num_top),
        top_logprobs=np.array([value.top_logprobs for value in values], dtype=np.float32).reshape(-1, num_top),
    )


class HashRunner:
    """A Runner whose tokens prove that the right slots were written and read.

    Of a row's rules it acts on masks, by taking the next token id that is left; it has no logits to change.
    `fail_next` lets the next step raise that error; `faulty_tokens` makes a row fail alone whose last token is one of
    them; a cleared `gate` holds steps up.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self._slots = np.full((num_blocks, block_size), _EMPTY_SLOT, dtype=np.int64)
        self._vocab_size = vocab_size
        self.fail_next: Exception | None = None
        self.faulty_tokens: frozenset[int] = frozenset()
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0

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

    def execute(self, batch: StepBatch) -> StepOutput:
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
        token_ids = [token_id or 0 for token_id in drawn]
        return StepOutput(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=self._logprobs(batch, token_ids),
            problems=problems,
            forward_ns=1000,
            sample_ns=100,
            prompt_logprobs=_prompt_logprobs(batch),
        )

    def _write(self, batch: StepBatch) -> None:
        for row, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
            if batch.positions[end - 1] != batch.context_lens[row] - 1:
                raise AssertionError("the last token of a batch row sits at the end of its context")
            for position, token_id in zip(batch.positions[start:end], batch.token_ids[start:end], strict=True):
                block, slot = divmod(int(position), self._slots.shape[1])
                self._slots[batch.block_tables[row, block], slot] = token_id

    def _draw(self, batch: StepBatch, index: int) -> int | None:
        row = int(batch.sampled[index])
        num_tokens = int(batch.context_lens[row])
        num_blocks = -(-num_tokens // self._slots.shape[1])
        context = self._slots[batch.block_tables[row, :num_blocks]].reshape(-1)[:num_tokens].tolist()
        sampling = batch.sampling
        token_id = next_token(context, int(sampling.seeds[index]), int(sampling.offsets[index]), self._vocab_size)
        return token_id if sampling.rules is None else _nearest_left(token_id, sampling.rules, index, self._vocab_size)

    def _logprobs(self, batch: StepBatch, drawn: list[int]) -> dict[int, TokenLogprobs]:
        return {
            index: logprobs_of(token_id, int(num))
            for index, (token_id, num) in enumerate(zip(drawn, batch.sampling.num_logprobs, strict=True))
            if num >= 0
        }


def _nearest_left(token_id: int, rules: LogitRuleColumns, index: int, vocab_size: int) -> int | None:
    """The first of this token and those after it that the row's masks leave, around the vocabulary; None if none is."""

    def listed(lists: TokenLists) -> set[int]:
        return set(lists.token_ids[lists.cu_lens[index] : lists.cu_lens[index + 1]].tolist())

    allowed, forbidden = listed(rules.allowed), listed(rules.forbidden)
    for step in range(vocab_size):
        candidate = (token_id + step) % vocab_size
        if candidate not in forbidden and (candidate in allowed or not allowed):
            return candidate
    return None


def _prompt_logprobs(batch: StepBatch) -> dict[int, PromptLogprobs]:
    targets = batch.prompt_targets
    if targets is None:
        return {}
    ends = np.cumsum(targets.num_tokens)
    columns = zip(targets.rows, ends - targets.num_tokens, ends, targets.num_top, strict=True)
    return {
        int(row): prompt_logprobs_of(targets.token_ids[start:end].tolist(), int(num_top))
        for row, start, end, num_top in columns
    }
