"""Memory that the ranks of a node share: one file without a name, which its processes inherit with what wakes them.

Who writes a word is its only writer. A wake is a system call on both sides, behind which what was written is seen.
"""

import json
import mmap
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline_executor.share import Share

RING_BYTES = 4 << 20
PART_BYTES = 1 << 20  # of a sum, at a time
NUM_POSTS = 64
_LINE = 8  # words of a cache line
# By rank: how far it has read the ring, how often its heart has beaten, how many parts of sums it has laid out.
_READ, _BEAT, _LAID_OUT = range(3)

Words = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


class Wake:
    """Whoever waits looks again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def give(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def wait_until(self, is_there: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Returns whether it is, at the latest when no wake came for so long."""
        while not is_there():
            if timeout_s is not None and not select.select([self._descriptor], [], [], timeout_s)[0]:
                return is_there()
            os.eventfd_read(self._descriptor)
        return True


@dataclass(frozen=True, slots=True)
class Descriptors:
    memory: int
    of_batches: tuple[int, ...]  # by rank: one lies in the ring
    of_parts: tuple[int, ...]  # by rank: a part of a sum is laid out
    of_followers: int  # one has read
    of_posts: int
    store: int  # by which a library's ranks find one another: a file without a name, or node 0's listening socket

    @classmethod
    def new(cls, degree: int, listening: int | None = None) -> "Descriptors":
        """listening: the store's socket, whose owner this becomes."""
        memory = os.memfd_create("paceline-ranks")
        os.ftruncate(memory, _layout(degree)[-1])
        batches, parts = (tuple(os.eventfd(0) for _ in range(degree)) for _ in range(2))
        store = os.memfd_create("paceline-store") if listening is None else listening
        return cls(memory, batches, parts, os.eventfd(0), os.eventfd(0), store)

    @classmethod
    def from_json(cls, text: str) -> "Descriptors":
        fields: dict[str, Any] = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("of_batches", "of_parts")}
        return cls(**fields | lists)

    def json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def all(self) -> Sequence[int]:
        return (self.memory, *self.of_batches, *self.of_parts, self.of_followers, self.of_posts, self.store)

    def close(self) -> None:
        for descriptor in self.all:
            os.close(descriptor)


class GroupMemory:
    """As one rank maps it, or the head of a node other than 0, which writes what rank 0 tells into the ring."""

    def __init__(
        self, descriptors: Descriptors, rank: int, share: Share, store_at: tuple[str, int] | None = None
    ) -> None:
        """rank: a head's is the first of its node. store_at: host and port, where there are several nodes."""
        degree = share.degree
        words, posts, ring, parts, size = _layout(degree)
        whole: ByteArray = np.frombuffer(mmap.mmap(descriptors.memory, size), np.uint8)
        self.rank = rank
        self.share = share
        self.store, self.store_at = descriptors.store, store_at
        self.written: Words = whole[:words].view(np.int64)  # [1]: bytes of the ring, since the beginning
        of_ranks: Words = whole[words:posts].view(np.int64).reshape(degree, -1)
        self.read, self.beats, self.laid_out = (of_ranks[:, word] for word in (_READ, _BEAT, _LAID_OUT))
        self.posts: Words = whole[posts:ring].view(np.int64).reshape(degree, NUM_POSTS, 2)  # step + 1, hash
        self.ring = whole[ring:parts]
        self.parts = whole[parts:].reshape(degree, 2, PART_BYTES)
        self.batch_wakes = [Wake(descriptor) for descriptor in descriptors.of_batches]
        self.part_wakes = [Wake(descriptor) for descriptor in descriptors.of_parts]
        self.follower_wake, self.post_wake = Wake(descriptors.of_followers), Wake(descriptors.of_posts)

    @property
    def degree(self) -> int:
        return self.share.degree

    def beat(self) -> None:
        self.beats[self.rank] += 1


def _layout(degree: int) -> tuple[int, int, int, int, int]:
    """Where ranks' words begin, their posts, the ring, the parts, and where all ends."""
    words = 8 * _LINE
    posts = words + 8 * _LINE * degree
    ring = posts + 16 * NUM_POSTS * degree
    parts = ring + RING_BYTES
    return words, posts, ring, parts, parts + degree * 2 * PART_BYTES
