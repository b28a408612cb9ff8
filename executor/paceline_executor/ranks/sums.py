"""Sums over the ranks of one machine: each lays its part out in shared memory, and each adds up all of them."""

import torch

from paceline_executor.ranks.memory import PART_BYTES, ByteArray, GroupMemory
from paceline_kernels.linear import sum_of_slices


class SharedMemorySums:
    """See Collectives. Called from the thread that computes.

    A part lies in one of two places by turns: before the third is laid out every rank has laid out its second, and so
    has read the first.
    """

    def __init__(self, memory: GroupMemory) -> None:
        self._memory = memory
        self._places = memory.parts[memory.rank]
        self._others = [rank for rank in range(memory.degree) if rank != memory.rank]

    @property
    def degree(self) -> int:
        return self._memory.degree

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        total = torch.empty_like(part, memory_format=torch.contiguous_format)
        source, target = _flat(part.contiguous()), _flat(total)
        for start in range(0, source.size, PART_BYTES):
            piece = slice(start, min(start + PART_BYTES, source.size))
            parts = torch.stack([torch.from_numpy(one).view(part.dtype) for one in self._gather(source[piece])])
            target[piece] = _flat(sum_of_slices(parts[:, None]))
        return total

    def _gather(self, piece: ByteArray) -> list[ByteArray]:
        """By rank; valid until the one after the next."""
        memory, own = self._memory, self._memory.rank
        number = int(memory.laid_out[own])
        self._places[number % 2, : piece.size] = piece
        memory.laid_out[own] = number + 1
        for rank in self._others:
            memory.part_wakes[rank].give()
        memory.part_wakes[own].wait_until(lambda: int(memory.laid_out.min()) > number)
        return [memory.parts[rank, number % 2, : piece.size] for rank in range(memory.degree)]


def _flat(tensor: torch.Tensor) -> ByteArray:
    flat: ByteArray = tensor.view(-1).view(torch.uint8).numpy()
    return flat
