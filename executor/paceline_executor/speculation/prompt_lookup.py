"""Drafts from the row's own tokens: what followed the last few where they stood before. Knows tokens only.

"Prompt lookup decoding", Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding.

Positions are chained by a hash of the two tokens that end there, as in RFC 1951, section 4. So a token is indexed once,
and a guess looks at a few positions, however long the row is. A row takes 4 bytes per token and 64 KiB.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline_executor.runner.interface import Int32Array
from paceline_executor.runner.row_rules import NO_TOKENS
from paceline_executor.speculation.drafter import WantedDrafts

_MIN_MATCH = 2  # tokens
_MAX_MATCH = 8
_MAX_CANDIDATES = 16
_BUCKET_BITS = 14
_MAX_INDEXED = 8192  # tokens of a row and step, 0.6 ms
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # Knuth, volume 3, 6.4
_SHIFT = np.uint64(64 - _BUCKET_BITS)
_NOWHERE = -1


class PromptLookup:
    def __init__(self) -> None:
        self._indices: dict[int, _Index] = {}  # by row

    def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        return [self._draft(of_row.row, of_row.token_ids, of_row.num_wanted) for of_row in wanted.rows]

    def forget(self, row: int) -> None:
        self._indices.pop(row, None)

    def _draft(self, row: int, token_ids: Int32Array, num_wanted: int) -> Int32Array:
        index = self._indices.setdefault(row, _Index())
        if not index.follow(token_ids):
            return NO_TOKENS
        match = index.longest_match(token_ids)
        if match == _NOWHERE:
            return NO_TOKENS
        # What repeats goes on repeating.
        period = token_ids.size - 1 - match
        drafts: Int32Array = token_ids[match + 1 + np.arange(num_wanted) % period]
        return drafts


class _Index:
    """Tells where each pair of a row's tokens stood."""

    def __init__(self) -> None:
        self._latest: Int32Array = np.full(1 << _BUCKET_BITS, _NOWHERE, dtype=np.int32)  # by hash
        self._before: Int32Array = np.full(64, _NOWHERE, dtype=np.int32)  # by position
        self._num_indexed = 1  # no pair ends there

    def follow(self, token_ids: Int32Array) -> bool:
        """Returns whether that was all."""
        start, stop = self._num_indexed, min(token_ids.size, self._num_indexed + _MAX_INDEXED)
        if stop > start:
            if stop > self._before.size:
                room: Int32Array = np.full(max(stop, 2 * self._before.size), _NOWHERE, dtype=np.int32)
                room[: self._before.size] = self._before
                self._before = room
            self._chain(_hashes(token_ids[start - 1 : stop]), start)
            self._num_indexed = stop
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

    def longest_match(self, token_ids: Int32Array) -> int:
        """Where most tokens are those at the end, the latest on ties; or _NOWHERE."""
        end = token_ids.size - 1
        candidates: list[int] = []
        position = int(self._before[end]) if end else _NOWHERE
        while position != _NOWHERE and len(candidates) < _MAX_CANDIDATES:
            candidates.append(position)
            position = int(self._before[position])
        if not candidates:
            return _NOWHERE
        back = np.arange(_MAX_MATCH)
        positions = np.array(candidates)[:, None] - back
        is_equal = (token_ids[np.maximum(positions, 0)] == token_ids[np.maximum(end - back, 0)]) & (positions >= 0)
        lengths = np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)
        best = int(lengths.argmax())
        return candidates[best] if lengths[best] >= _MIN_MATCH else _NOWHERE


def _hashes(token_ids: Int32Array) -> npt.NDArray[np.intp]:
    """Hashes each pair."""
    pairs = token_ids[:-1].astype(np.uint64) << np.uint64(32) | token_ids[1:].astype(np.uint64)
    return (pairs * _FACTOR >> _SHIFT).astype(np.intp)
