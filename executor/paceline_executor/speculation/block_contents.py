"""Which tokens a drafter's own KV cache holds, block by block. Knows block ids and tokens.

A slot counts for a row if its token is the row's and all tokens before the block are: whatever became of the block.
"""

import numpy as np
import numpy.typing as npt

from paceline_executor.runner.interface import Int32Array, UInt64Array

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: its powers are invertible modulo 2**64
_EMPTY = -1


class BlockContents:
    def __init__(self, num_blocks: int, block_size: int, max_len: int) -> None:
        self._token_ids: Int32Array = np.full((num_blocks, block_size), _EMPTY, dtype=np.int32)
        self._before: UInt64Array = np.zeros(num_blocks, dtype=np.uint64)
        self._factors: UInt64Array = np.cumprod(np.full(max_len, _FACTOR), dtype=np.uint64)

    def num_held(self, token_ids: Int32Array, block_ids: Int32Array) -> int:
        block_size, num_tokens = self._token_ids.shape[1], token_ids.size
        blocks = block_ids[: -(-num_tokens // block_size)]
        follows = np.repeat(self._before[blocks] == self._hashes(token_ids), block_size)[:num_tokens]
        is_held: npt.NDArray[np.bool_] = follows & (self._token_ids[blocks].ravel()[:num_tokens] == token_ids)
        return num_tokens if is_held.all() else int(is_held.argmin())

    def put(self, token_ids: Int32Array, start: int, block_ids: Int32Array) -> None:
        """Tokens from `start` on were computed, behind those held. What lay behind them is gone."""
        block_size, num_tokens = self._token_ids.shape[1], token_ids.size
        first, stop = start // block_size, -(-num_tokens // block_size)
        blocks = block_ids[first:stop]
        filled = np.full(blocks.size * block_size, _EMPTY, dtype=np.int32)
        filled[: num_tokens - first * block_size] = token_ids[first * block_size :]
        self._token_ids[blocks] = filled.reshape(-1, block_size)
        self._before[blocks] = self._hashes(token_ids)[first:]

    def _hashes(self, token_ids: Int32Array) -> UInt64Array:
        """Of the tokens before each block: the sum of (t + 1) * factor**(p + 1)."""
        block_size, num_tokens = self._token_ids.shape[1], token_ids.size
        num_whole = (num_tokens - 1) // block_size * block_size
        values = (token_ids[:num_whole] + np.int64(1)).astype(np.uint64) * self._factors[:num_whole]
        sums = values.reshape(-1, block_size).sum(axis=1, dtype=np.uint64)
        return np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(sums, dtype=np.uint64)))
