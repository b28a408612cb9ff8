"""What a recording has in place of token ids: numbers below the vocabulary's size that are equal where all tokens up to
there are equal, and differ where these first differ.

Tokens are shuffled and moved round the vocabulary by as much as those before them say, under a key that is drawn for
the recording and written nowhere. A core finds the same prefixes equal, and nobody goes back from stand-ins, nor on
from one request to another. The hash of a prefix is multilinear (Lemire and Kaser 2014, "Strongly universal string
hashing is fast"), what it moves by a tabulation of that (Zobrist 1970): sums over columns, so that 256 rows cost about
what one does.
"""

import secrets
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b, shake_256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import (
    KEY_BYTES,
    FailedStep,
    Float32Array,
    Int32Array,
    LogprobColumns,
    RowLogprobs,
    StepResult,
    UInt64Array,
)
from paceline_scheduler.core.executors import ExecutorDescription, SeenRow
from paceline_scheduler.core.request import NOTHING_HELD, Request

_NEUTRAL = SamplingParams()
_LANES = (np.arange(8, dtype=np.intp) * 256)[:, np.newaxis]  # where each byte's table begins
_FIRST_POSITIONS = 1024
_ANY_VOCAB = 1 << 31
_NO_HASH = 1  # of no tokens that there are, but by chance


class Prefixes(NamedTuple):
    """Hashes and lengths of what came before, of each row."""

    hashes: UInt64Array
    lengths: npt.NDArray[np.int64]


class StandIns:
    """Of one recording. What rows hold (`describe`, `place`, `result`) is for one thread."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._tables = np.frombuffer(self._stream(b"tables", 4 * 256), dtype=np.uint32)
        self._factors = np.zeros(0, dtype=np.uint64)
        self._vocab_sizes: dict[str, int] = {}  # by model
        self._shuffles: dict[int, Int32Array] = {}  # by size of the vocabulary
        self._rows: dict[str, tuple[str, Prefixes]] = {}  # by address: the model, and what each row has

    # Tokens

    def of(self, model: str, token_ids: Int32Array) -> Int32Array:
        """`token_ids` are a request's, from its first."""
        hashes = self._prefix_hashes(token_ids)
        return self._moved(token_ids, hashes[:-1], self._vocab_size(model))

    def digest(self, data: bytes, size: int = KEY_BYTES) -> bytes:
        return blake2b(data, digest_size=size, key=self._key).digest() if data else b""

    def know(self, description: ExecutorDescription) -> None:
        self._vocab_sizes.setdefault(description.model, description.vocab_size)

    def describe(self, description: ExecutorDescription) -> None:
        """The executor's rows are told with `place`."""
        self.know(description)
        empty = np.zeros(description.max_num_rows, dtype=np.uint64), np.zeros(description.max_num_rows, dtype=np.int64)
        self._rows[description.address] = description.model, Prefixes(*empty)

    def place(self, address: str, row: int, *parts: Int32Array) -> None:
        """A row begins with these tokens."""
        known = np.concatenate(parts)
        prefixes = self._rows[address][1]
        prefixes.hashes[row], prefixes.lengths[row] = self._prefix_hashes(known)[-1], len(known)

    def result(self, address: str, result: StepResult) -> Int32Array:
        model, prefixes = self._rows[address]
        vocab_size, num_accepted = self._vocab_size(model), result.num_accepted
        if len(result.token_ids) == len(result.rows) == np.count_nonzero(num_accepted):
            return self._drawn(prefixes, result.rows, result.token_ids, vocab_size)  # one each, as nearly always
        token_ids = np.empty_like(result.token_ids)
        starts = np.cumsum(num_accepted) - num_accepted
        for number in range(int(num_accepted.max(initial=0))):
            taking = num_accepted > number
            places = starts[taking] + number
            token_ids[places] = self._drawn(prefixes, result.rows[taking], result.token_ids[places], vocab_size)
        return token_ids

    def _drawn(self, prefixes: Prefixes, rows: Int32Array, drawn: Int32Array, vocab_size: int) -> Int32Array:
        """Of one more token of each row, which is appended."""
        hashes, lengths = prefixes.hashes.take(rows), prefixes.lengths.take(rows)
        factors = self._reach(int(np.maximum.reduce(lengths, initial=0)) + 1)
        prefixes.hashes[rows] = hashes + factors.take(lengths) * _words(drawn)
        prefixes.lengths[rows] = lengths + 1
        return self._moved(drawn, hashes, vocab_size)

    def _moved(self, token_ids: Int32Array, hashes: UInt64Array, vocab_size: int) -> Int32Array:
        lanes = hashes.view(np.uint8).reshape(-1, 8).T + _LANES
        by = np.bitwise_xor.reduce(self._tables.take(lanes), axis=0) % np.uint32(vocab_size)
        if vocab_size != _ANY_VOCAB:
            token_ids = self._shuffle(vocab_size).take(token_ids, mode="clip")
        moved = token_ids.view(np.uint32) + by
        # Below 0 is above all else.
        hidden: Int32Array = np.minimum(moved, moved - np.uint32(vocab_size)).view(np.int32)
        return hidden

    def _shuffle(self, vocab_size: int) -> Int32Array:
        found = self._shuffles.get(vocab_size)
        if found is None:
            words = np.frombuffer(self._stream(b"shuffle", vocab_size), dtype=np.uint64)
            found = self._shuffles[vocab_size] = np.argsort(words).astype(np.int32)
        return found

    def _prefix_hashes(self, token_ids: Int32Array) -> UInt64Array:
        """Return the hash before each token, and that of all."""
        factors = self._reach(len(token_ids))[: len(token_ids)]
        hashes = np.zeros(len(token_ids) + 1, dtype=np.uint64)
        np.cumsum(factors * _words(token_ids), out=hashes[1:])
        return hashes

    def _reach(self, num_positions: int) -> UInt64Array:
        """Return secret factors for at least so many positions, in whichever thread."""
        factors = self._factors
        if num_positions > len(factors):
            wanted = max(num_positions, 2 * len(factors), _FIRST_POSITIONS)
            self._factors = factors = np.frombuffer(self._stream(b"factors", wanted), dtype=np.uint64) | np.uint64(1)
        return factors

    def _stream(self, name: bytes, num_words: int) -> bytes:
        return shake_256(self._key + name).digest(8 * num_words)

    def _vocab_size(self, model: str) -> int:
        return self._vocab_sizes.get(model, _ANY_VOCAB)

    # Values that tokens are in

    def request(self, request: Request) -> Request:
        """Without anything that its client wrote, but for its names."""
        return replace(
            request,
            prompt_token_ids=self.of(request.model, request.prompt_token_ids),
            sampling=_NEUTRAL,
            end_token_ids=(),
            ignored_end_token_ids=(),
            bad_words=(),
            cache_salt=self.digest(request.cache_salt.encode()).hex(),
            point=NOTHING_HELD,
            origin=bytes(len(request.origin)),
            structured=bytes(len(request.structured)),
            body_digest=self.digest(request.body_digest),
            trace_parent="",
        )

    def returning(self, request: Request, prompt: Int32Array, held: Int32Array | None) -> Request:
        """A request that is sent again and goes on from `prompt`; `held` is what its client has of the output,
        if the core knew that. Of those tokens the core asks for their hash, and whether the last one is an end token.
        """
        point, prior = request.point, request.point.prior_output_token_ids
        held = prior if prior is not None else held
        if held is None or rolling_hash(HASH_START, held) != point.resume_hash:
            resume_hash = _NO_HASH
        else:
            resume_hash = rolling_hash(HASH_START, self.output(request.model, prompt, held))
        hidden = None if prior is None else self.output(request.model, prompt, prior)
        ends = prior is not None and len(prior) > 0 and int(prior[-1]) in request.end_token_ids
        return replace(
            self.request(request),
            end_token_ids=(int(hidden[-1]),) if hidden is not None and ends else (),
            point=replace(point, resume_hash=resume_hash, prior_output_token_ids=hidden),
        )

    def output(self, model: str, prompt: Int32Array, output: Int32Array) -> Int32Array:
        return self.of(model, np.concatenate((prompt, output)))[len(prompt) :]

    def seen_row(self, seen: SeenRow, model: str) -> SeenRow:
        known = self.of(model, np.concatenate((seen.prompt_token_ids, seen.output_token_ids)))
        num_prompt = len(seen.prompt_token_ids)
        return replace(
            seen,
            prompt_token_ids=known[:num_prompt],
            output_token_ids=known[num_prompt:],
            sampling=None if seen.sampling is None else _NEUTRAL,
            end_token_ids=(),
            context=b"",
            logprobs=None if seen.logprobs is None else columns_without_values(seen.logprobs),
            request=None if seen.request is None else self.request(seen.request),
        )

    def description(self, description: ExecutorDescription) -> ExecutorDescription:
        failed = description.failed_step
        return replace(
            description,
            tag_key=self.digest(description.tag_key),
            failed_step=None if failed is None else FailedStep(failed.epoch, failed.step_id, failed.message),
        )


def _words(token_ids: Int32Array) -> UInt64Array:
    """Above 0 each, so that a token 0 counts."""
    return token_ids.astype(np.uint64) + np.uint64(1)


def without_values(told: Iterable[RowLogprobs]) -> tuple[RowLogprobs, ...]:
    return tuple(
        RowLogprobs(each.row, np.zeros_like(each.token_ids), columns_without_values(each.columns)) for each in told
    )


def columns_without_values(columns: LogprobColumns) -> LogprobColumns:
    none: Float32Array = np.zeros((columns.num_tokens, 0), dtype=np.float32)
    return LogprobColumns(columns.offset, np.zeros_like(columns.logprobs), none.astype(np.int32), none)
