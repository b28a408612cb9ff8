"""Whether all ranks draw the same tokens: each posts a hash of every step, and rank 0 compares.

A step is compared when it lands, or one of the next ones: a token of a step that differs may have left by then, one of
any later step has not.
"""

import hashlib
from collections import deque

from paceline_executor.errors import RankError
from paceline_executor.ranks.memory import NUM_POSTS, GroupMemory
from paceline_executor.runner.interface import StepOutput

_MAX_WAITING = NUM_POSTS // 2


def hash_of(step: int, output: StepOutput) -> int:
    hashed = hashlib.blake2b(step.to_bytes(8, "little"), digest_size=8)
    hashed.update(output.num_accepted.astype("<i4").tobytes())
    hashed.update(output.token_ids.astype("<i4").tobytes())
    return int.from_bytes(hashed.digest(), "little", signed=True)


class Posts:
    """A follower's."""

    def __init__(self, memory: GroupMemory) -> None:
        self._memory = memory

    def landed(self, step: int, output: StepOutput) -> None:
        place = self._memory.posts[self._memory.rank, step % NUM_POSTS]
        place[1] = hash_of(step, output)
        place[0] = step + 1
        self._memory.post_wake.give()


class DrawGuard:
    """Rank 0's."""

    def __init__(self, memory: GroupMemory) -> None:
        self._memory = memory
        self._waiting: deque[tuple[int, int]] = deque()  # step and hash, oldest first

    def landed(self, step: int, output: StepOutput) -> None:
        """Raises RankError for the first step in which a rank drew something else."""
        self._waiting.append((step, hash_of(step, output)))
        if len(self._waiting) > _MAX_WAITING:  # their places are written again
            self._memory.post_wake.wait_until(self._is_posted)
        while self._waiting and self._is_posted():
            self._compare(*self._waiting.popleft())

    def _is_posted(self) -> bool:
        step, _ = self._waiting[0]
        return bool((self._memory.posts[1:, step % NUM_POSTS, 0] > step).all())

    def _compare(self, step: int, own: int) -> None:
        hashes = self._memory.posts[1:, step % NUM_POSTS, 1].tolist()
        differing = [rank for rank, other in enumerate(hashes, start=1) if other != own]
        if differing:
            raise RankError(f"rank {differing[0]} drew other tokens than rank 0 in step {step} of this executor")
