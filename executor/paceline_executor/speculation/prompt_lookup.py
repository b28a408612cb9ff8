"""Drafts from the row's own tokens: what followed the last few where they stood before. Knows tokens only.

"Prompt lookup decoding", Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding.

Positions are chained by a hash of the two tokens that end there, as in RFC 1951, section 4. So a token is indexed once,
and a guess looks at a few positions, however long the row is. A row takes 4 bytes per token and 64 KiB.

The longer the match, the likelier what follows it. What a row would have drafted is compared with its tokens, verified
or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_executor.runner.drafter import MAX_NUM_DRAFT_TOKENS, WantedDrafts, WantingRow
from paceline_executor.runner.interface import Int32Array
from paceline_executor.runner.row_rules import NO_TOKENS

_MIN_MATCH = 2  # tokens
_MAX_MATCH = 16
_MAX_CANDIDATES = 16
_BUCKET_BITS = 14
_MAX_INDEXED = 8192  # tokens of a row and step, 0.6 ms
_MAX_ONE_BY_ONE = 32  # tokens, in less time than numpy
_FACTOR = 0x9E3779B97F4A7C15  # Knuth, volume 3, 6.4
_SHIFT = 64 - _BUCKET_BITS
_MASK = 2**64 - 1
_NOWHERE = -1
_FIRST_WEIGHT = 3.0  # in drafts, of what a length is expected to show
_KEEP = 0.98  # of what it has shown, per draft


class PromptLookup:
    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        return [self._of(row).draft(row, wanted.min_chance) for row in wanted.rows]

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def _of(self, row: WantingRow) -> "_Row":
        known = self._rows.get(row.row)
        if known is None:
            known = self._rows[row.row] = _Row()
        return known


@dataclass(slots=True)
class _Guess:
    start: int
    match_length: int
    token_ids: list[int]


class _Row:
    def __init__(self) -> None:
        self._index = _Index()
        self._chances = _Chances()
        self._guess: _Guess | None = None

    def draft(self, wanting: WantingRow, min_chance: float) -> Int32Array:
        token_ids = wanting.token_ids
        self._learn(token_ids)
        if not self._index.follow(token_ids):
            return NO_TOKENS
        place, length = self._index.longest_match(token_ids)
        if length < _MIN_MATCH:
            return NO_TOKENS
        drafts = following(token_ids, place, max(wanting.num_wanted, MAX_NUM_DRAFT_TOKENS))
        self._guess = _Guess(token_ids.size, length, drafts.tolist())
        return drafts[: self._chances.num_worth(length, wanting.num_wanted, min_chance)]

    def _learn(self, token_ids: Int32Array) -> None:
        guess, self._guess = self._guess, None
        if guess is None:
            return
        came = token_ids[guess.start : guess.start + len(guess.token_ids)].tolist()
        for length, (draft, token_id) in enumerate(zip(guess.token_ids, came, strict=False), guess.match_length):
            self._chances.observe(length, is_right=draft == token_id)
            if draft != token_id:
                break


class _Chances:
    """By the match's length, at first 1 - 1 / length (MEASURED.md)."""

    def __init__(self) -> None:
        self._num_tried = [0.0] * (_MAX_MATCH + 1)
        self._num_right = [0.0] * (_MAX_MATCH + 1)

    def observe(self, length: int, *, is_right: bool) -> None:
        length = min(length, _MAX_MATCH)
        self._num_tried[length] = _KEEP * self._num_tried[length] + 1.0
        self._num_right[length] = _KEEP * self._num_right[length] + is_right

    def num_worth(self, length: int, num_wanted: int, min_chance: float) -> int:
        chance = 1.0
        for num_drafts in range(num_wanted):
            at = min(length + num_drafts, _MAX_MATCH)
            right = self._num_right[at] + _FIRST_WEIGHT * (1.0 - 1.0 / at)
            chance *= right / (self._num_tried[at] + _FIRST_WEIGHT)
            if chance < min_chance:
                return num_drafts
        return num_wanted


def following(token_ids: Int32Array, place: int, num_tokens: int) -> Int32Array:
    """What repeats goes on repeating."""
    period = token_ids.size - 1 - place
    if num_tokens <= period:
        return token_ids[place + 1 : place + 1 + num_tokens]
    repeated: Int32Array = token_ids[place + 1 + np.arange(num_tokens) % period]
    return repeated


class _Index:
    """Tells where each pair of a row's tokens stood."""

    def __init__(self) -> None:
        self._latest: Int32Array = np.full(1 << _BUCKET_BITS, _NOWHERE, dtype=np.int32)  # by hash
        self._before: Int32Array = np.full(64, _NOWHERE, dtype=np.int32)  # by position
        self._num_indexed = 1  # no pair ends there

    def follow(self, token_ids: Int32Array) -> bool:
        """Returns whether that was all."""
        start, stop = self._num_indexed, min(token_ids.size, self._num_indexed + _MAX_INDEXED)
        if stop > self._before.size:
            room: Int32Array = np.full(max(stop, 2 * self._before.size), _NOWHERE, dtype=np.int32)
            room[: self._before.size] = self._before
            self._before = room
        if stop - start > _MAX_ONE_BY_ONE:
            self._chain(_hashes(token_ids[start - 1 : stop]), start)
        elif stop > start:
            self._chain_one_by_one(token_ids[start - 1 : stop].tolist(), start)
        self._num_indexed = max(start, stop)
        return self._num_indexed >= token_ids.size

    def _chain(self, hashes: npt.NDArray[np.intp], start: int) -> None:
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        positions = (order + start).astype(np.int32)
        before = np.where(is_first, self._latest[ordered], np.roll(positions, 1))
        self._before[positions] = before
        is_last = np.roll(is_first, -1)
        self._latest[ordered[is_last]] = positions[is_last]

    def _chain_one_by_one(self, tokens: list[int], start: int) -> None:
        latest, before = self._latest.data, self._before.data
        first = tokens[0]
        for position, second in enumerate(tokens[1:], start):
            bucket = ((first << 32 | second) * _FACTOR & _MASK) >> _SHIFT
            before[position], latest[bucket] = latest[bucket], position
            first = second

    def longest_match(self, token_ids: Int32Array) -> tuple[int, int]:
        """Returns where most tokens are those at the end, the latest on ties, and how many."""
        end, best, best_length = token_ids.size - 1, _NOWHERE, 0
        before = self._before.data
        last = token_ids[max(0, end + 1 - _MAX_MATCH) :].tolist()
        last.reverse()
        place = before[end] if end > 0 else _NOWHERE
        for _ in range(_MAX_CANDIDATES):
            if place == _NOWHERE:
                break
            earlier = token_ids[max(0, place + 1 - _MAX_MATCH) : place + 1].tolist()
            earlier.reverse()
            length = 0
            for token_id, other in zip(last, earlier, strict=False):
                if token_id != other:
                    break
                length += 1
            if length > best_length:
                best, best_length = place, length
            if best_length == _MAX_MATCH:
                break
            place = before[place]
        return best, best_length


def _hashes(token_ids: Int32Array) -> npt.NDArray[np.intp]:
    """Hashes each pair."""
    pairs = token_ids[:-1].astype(np.uint64) << np.uint64(32) | token_ids[1:].astype(np.uint64)
    return (pairs * np.uint64(_FACTOR) >> np.uint64(_SHIFT)).astype(np.intp)
