"""The hashes that travel in the plan protocol, and the seed of a request that names none: both sides compute the same.

All fold 64-bit words in FNV-1a's manner with one more shift, as the comments of `plan.proto` and `inference.proto`
define them; the seed is BLAKE2b (RFC 7693).
"""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from paceline.plan.values import BlockGrants, Int32Array, RecordId, UInt64Array

HASH_START = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1
_ROW_SHIFT, _INDEX_SHIFT = np.uint64(48), np.uint64(32)


def fold(value: int, words: Iterable[int]) -> int:
    """Return a hash after these words too."""
    for word in words:
        value = ((value ^ word) * _PRIME) & _MASK
        value ^= value >> 32
    return value


def rolling_hash(value: int, token_ids: Int32Array) -> int:
    """Return the hash of one output after these tokens too (paceline.v1.Delta.rolling_hash)."""
    return fold(value, token_ids.tolist())


def rolling_hashes(values: UInt64Array, token_ids: Int32Array) -> UInt64Array:
    """Return the hashes of many outputs after one more token each."""
    mixed = (values ^ token_ids.astype(np.uint64)) * np.uint64(_PRIME)
    return mixed ^ (mixed >> np.uint64(32))


def grant_hash(value: int, grants: BlockGrants) -> int:
    """Return the hash of an epoch's grants after these too (paceline.v1.StepResult.grant_hash)."""
    if not len(grants.rows):
        return value
    words = (grants.rows.astype(np.uint64) << _ROW_SHIFT) + (grants.indices.astype(np.uint64) << _INDEX_SHIFT)
    return fold(value, (words + grants.block_ids.astype(np.uint64)).tolist())


def seed_of(record_id: RecordId) -> int:
    """Return the seed of a request that names none: BLAKE2b-64 of tenant, a zero byte and request_id, little-endian.

    For a completion other than the first, a zero byte and its index in decimal follow.
    """
    name = f"{record_id.tenant}\0{record_id.request_id}".encode()
    if record_id.index:
        name += f"\0{record_id.index}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


TOKENIZER_FORM = 4
"""What a tokenizer's digest covers, and how a model's files are read into it: raised whenever either changes. Executors
before form 2 name a digest that cannot be computed from what they send, those before form 3 no special token that only
a class of transformers knows, and those before form 4 no response template and none for chats with tools alone.
"""


def tokenizer_digest(content: bytes, form: int = TOKENIZER_FORM) -> str:
    """Return the digest of what `codec.tokenizers.write_content` returns: its form and a BLAKE2b-128 hash in hex."""
    return f"{form}:{blake2b(content, digest_size=16).hexdigest()}"


def tokenizer_form(digest: str) -> int:
    """Return the form of an announced digest: 1 where it names none."""
    form, separator, _ = digest.partition(":")
    return int(form) if separator and form.isascii() and form.isdecimal() and len(form) < 4 else 1
