"""The hash of all block grants of an epoch, by which scheduler and executor notice at once that they disagree."""

import numpy as np

from paceline_executor.rows.plan import BlockGrants

START = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = 0xFFFFFFFFFFFFFFFF


def hash_grants(value: int, grants: BlockGrants) -> int:
    """Carry the hash on over more grants, as `StepResult.grant_hash` in the protocol describes it."""
    if not grants.rows.size:
        return value
    rows, indices, blocks = (column.astype(np.uint64) for column in (grants.rows, grants.indices, grants.block_ids))
    words = (rows << np.uint64(48)) + (indices << np.uint64(32)) + blocks
    for word in words.tolist():
        value = ((value ^ word) * _PRIME) & _MASK
        value ^= value >> 32
    return value
