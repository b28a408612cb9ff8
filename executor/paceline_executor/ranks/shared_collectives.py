"""Collectives of the ranks of one machine: each lays its part out in shared memory, and each reads those of all."""

from collections.abc import Iterator

import numpy as np
import torch

from paceline_executor.ranks.memory import PART_BYTES, ByteArray, GroupMemory
from paceline_kernels.linear import sum_of_slices


class SharedMemoryCollectives:
    """See Collectives. Called from the thread that computes.

    A part lies in one of two places by turns: before the third is laid out every rank has laid out its second, and so
    has read the first.
    """

    def __init__(self, memory: GroupMemory) -> None:
        self._memory = memory
        self._places = memory.parts[memory.rank]
        self._others = [rank for rank in range(memory.degree) if rank != memory.rank]

    @property
    def rank(self) -> int:
        return self._memory.rank

    @property
    def degree(self) -> int:
        return self._memory.degree

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty((self.degree, *part.shape), dtype=part.dtype)
        targets = _flat(gathered).reshape(self.degree, -1)
        for piece, parts in self._pieces(part):
            targets[:, piece] = parts
        return gathered

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        total = torch.empty_like(part, memory_format=torch.contiguous_format)
        target = _flat(total)
        for piece, parts in self._pieces(part):
            slices = torch.from_numpy(np.ascontiguousarray(parts)).view(part.dtype)
            target[piece] = _flat(sum_of_slices(slices[:, None]))
        return total

    def _pieces(self, part: torch.Tensor) -> Iterator[tuple[slice, ByteArray]]:
        """Which bytes of the part, and those of all ranks, by rank, valid until the one after the next."""
        source = _flat(part.contiguous())
        for start in range(0, source.size, PART_BYTES):
            piece = slice(start, min(start + PART_BYTES, source.size))
            yield piece, self._exchanged(source[piece])

    def _exchanged(self, piece: ByteArray) -> ByteArray:
        memory, own = self._memory, self._memory.rank
        number = int(memory.laid_out[own])
        self._places[number % 2, : piece.size] = piece
        memory.laid_out[own] = number + 1
        for rank in self._others:
            memory.part_wakes[rank].give()
        memory.part_wakes[own].wait_until(lambda: int(memory.laid_out.min()) > number)
        return memory.parts[:, number % 2, : piece.size]


def _flat(tensor: torch.Tensor) -> ByteArray:
    """Not by torch, which takes the strides of numpy's empty arrays, 0, for what they say."""
    flat: ByteArray = tensor.numpy().reshape(-1).view(np.uint8)
    return flat
