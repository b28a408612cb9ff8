"""Messages from rank 0 to all others of a node: a ring of bytes in shared memory, written once and read by each.

A message follows its length. One that is longer than the ring goes through it in pieces. Each rank wakes two others, so
that the first, whose steps wait for it, makes two system calls, however many there are.
"""

from functools import partial

import numpy as np

from paceline_executor.ranks.memory import RING_BYTES, ByteArray, GroupMemory, Wake

_LENGTH_BYTES = 8
_PIECE_BYTES = RING_BYTES // 4


class BatchRingWriter:
    def __init__(self, memory: GroupMemory) -> None:
        readers = memory.share.followers
        self._memory = memory
        self._read = memory.read[readers.start : readers.stop]
        self._next_wakes = _next_wakes(memory, 0)

    def write(self, message: bytes | bytearray) -> None:
        """Waits where the ring is full until all have read."""
        data = np.frombuffer(len(message).to_bytes(_LENGTH_BYTES, "little") + message, np.uint8)
        memory = self._memory
        for start in range(0, data.size, _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            written = int(memory.written[0])
            memory.follower_wake.wait_until(partial(self._has_room, written + piece.size))
            for place, part in _places(written, piece.size):
                memory.ring[place] = piece[part]
            memory.written[0] = written + piece.size
            for wake in self._next_wakes:
                wake.give()

    def _has_room(self, end: int) -> bool:
        return end - int(self._read.min(initial=end)) <= RING_BYTES


class BatchRingReader:
    def __init__(self, memory: GroupMemory) -> None:
        self._memory = memory
        self._next_wakes = _next_wakes(memory, 1 + memory.rank - memory.share.followers.start)

    def read(self, timeout_s: float | None = None) -> bytearray | None:
        """Waits for the next message; None where none came for so long."""
        wake = self._memory.batch_wakes[self._memory.rank]
        if not wake.wait_until(partial(self._is_ready, _LENGTH_BYTES), timeout_s):
            return None
        head: ByteArray = np.zeros(_LENGTH_BYTES, np.uint8)
        self._take(head)
        length = int(head.view("<i8")[0])
        message = bytearray(length)
        data: ByteArray = np.frombuffer(message, np.uint8)
        for start in range(0, length, _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            wake.wait_until(partial(self._is_ready, piece.size))
            self._take(piece)
        return message

    def _is_ready(self, num_bytes: int) -> bool:
        memory = self._memory
        return int(memory.written[0] - memory.read[memory.rank]) >= num_bytes

    def _take(self, out: ByteArray) -> None:
        memory = self._memory
        for place, part in _places(int(memory.read[memory.rank]), out.size):
            out[part] = memory.ring[place]
        memory.read[memory.rank] += out.size
        for wake in self._next_wakes:
            wake.give()
        memory.follower_wake.give()


def _next_wakes(memory: GroupMemory, place: int) -> list[Wake]:
    """place: of the writer 0, of readers from 1 on."""
    return [memory.batch_wakes[rank] for rank in memory.share.followers[2 * place : 2 * place + 2]]


def _places(start: int, size: int) -> list[tuple[slice, slice]]:
    """Where in the ring so many bytes from there on lie, and which of them: two where they go round its end."""
    first = start % RING_BYTES
    until_end = min(size, RING_BYTES - first)
    places = [(slice(first, first + until_end), slice(0, until_end))]
    return places if until_end == size else [*places, (slice(0, size - until_end), slice(until_end, size))]
