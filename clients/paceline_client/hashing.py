"""The rolling hash of output tokens that every delta carries: FNV-1a over 64-bit words, folded once per token.

The definition is the comment of `Delta.rolling_hash` in `paceline/v1/inference.proto`. Apart from `inbox`, because
servers in tests compute it too.
"""

from collections.abc import Iterable

EMPTY_HASH = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = 0xFFFFFFFFFFFFFFFF


def rolling_hash(token_ids: Iterable[int], start: int = EMPTY_HASH) -> int:
    """The 64-bit hash after these tokens, continuing from `start`."""
    value = start
    for token_id in token_ids:
        value = ((value ^ token_id) * _PRIME) & _MASK
        value ^= value >> 32
    return value
