"""Keys of the prefix cache: chained, keyed 128-bit hashes of full blocks.

A key stands for all tokens from the beginning up to the end of its block, the model, the tenant and the salt, so that
equal keys mean equal KV contents and no tenant can hit or guess another one's blocks. Hash: BLAKE2b (RFC 7693) keyed
with the deployment's tag key. Apart from `tables.blocks`, which takes keys and does not know what they are made of.
"""

from hashlib import blake2b

from paceline.plan.values import Int32Array
from paceline_scheduler.core.request import Request

KEY_SIZE = 16


class PrefixChain:
    """Keys are computed when they are asked for."""

    def __init__(self, tag_key: bytes, block_size: int, request: Request) -> None:
        self.tag_key = tag_key
        self.block_size = block_size
        self._keys: list[bytes] = []
        root = blake2b(digest_size=KEY_SIZE, key=tag_key)
        for part in (request.model, request.key.tenant, request.cache_salt):
            encoded = part.encode()
            # The length in front keeps ("ab", "c") and ("a", "bc") apart.
            root.update(len(encoded).to_bytes(4, "little") + encoded)
        self._root = root.digest()

    @property
    def known(self) -> tuple[bytes, ...]:
        return tuple(self._keys)

    def key(self, index: int, token_ids: Int32Array) -> bytes:
        """`token_ids` are known at least to the block's end."""
        while len(self._keys) <= index:
            start = len(self._keys) * self.block_size
            block = token_ids[start : start + self.block_size]
            assert len(block) == self.block_size, "only full blocks have keys"
            parent = self._keys[-1] if self._keys else self._root
            digest = blake2b(parent + block.tobytes(), digest_size=KEY_SIZE, key=self.tag_key)
            self._keys.append(digest.digest())
        return self._keys[index]
