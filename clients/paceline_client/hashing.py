"""FNV-1a over 64-bit words, one fold per token; `Delta.rolling_hash` in `paceline/v1/inference.proto` defines it.

Apart from `inbox`, because servers in tests compute it too.
"""

from collections.abc import Iterable

EMPTY_HASH = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = 0xFFFFFFFFFFFFFFFF


def rolling_hash(token_ids: Iterable[int], start: int = EMPTY_HASH) -> int:
    value = start
    for token_id in token_ids:
        value = ((value ^ token_id) * _PRIME) & _MASK
        value ^= value >> 32
    return value
