"""Two buffers of host memory, through which all bytes of a model go to its device: while the device takes one, threads
read into the other.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

import torch

from paceline_executor.weights.stored_tensor import Stored, read_rows_into

BUFFER_BYTES = 64 << 20
# A system call copies 6 GB/s out of the page cache; 16 at a time keep up with a PCIe 5 link.
NUM_READERS = 16
_LEAST_PIECE_BYTES = 1 << 20  # less is not worth a thread


class Sent(Protocol):
    """The host's memory is free again afterwards."""

    def synchronize(self) -> None:
        """Returns when the device has taken the bytes."""
        ...


class Transfer(Protocol):
    def new_buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns [num_bytes] uint8."""
        ...

    def send(self, part: torch.Tensor) -> tuple[torch.Tensor, Sent | None]:
        """The bytes on the device, [n] uint8, in the order of its work; None where the host's memory is the device's.

        Then they are valid until the buffer is filled again.
        """
        ...


class HostTransfer:
    """The CPU has the bytes already."""

    def new_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, part: torch.Tensor) -> tuple[torch.Tensor, Sent | None]:
        return part, None


class CudaTransfer:
    """Out of pinned memory, by its copy engine, in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, part: torch.Tensor) -> tuple[torch.Tensor, Sent | None]:
        sent = part.to(self._device, non_blocking=True)
        taken: Sent = torch.cuda.current_stream(self._device).record_event()
        return sent, taken


def transfer_to(device: torch.device) -> Transfer:
    return CudaTransfer(device) if device.type == "cuda" else HostTransfer()


class Staging:
    """One thread at a time; a context, at whose end all is freed."""

    def __init__(self, transfer: Transfer, buffer_bytes: int = BUFFER_BYTES, num_readers: int = NUM_READERS) -> None:
        """The memory is taken here: all that the host needs for a model of any size."""
        self._transfer = transfer
        self._buffers = [transfer.new_buffer(buffer_bytes) for _ in range(2)]
        self._sent: list[Sent | None] = [None, None]
        self._next = 0
        self._readers = ThreadPoolExecutor(num_readers, thread_name_prefix="weights")
        self._num_readers = num_readers

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readers.shutdown(cancel_futures=True)
        for sent in self._sent:
            if sent is not None:
                sent.synchronize()
        self._buffers.clear()

    def stream(self, tensor: Stored) -> Iterator[tuple[int, torch.Tensor]]:
        """In the order of the file: (first row, bytes [rows, bytes per row] on the device).

        A part is used before the next one is asked for; on a device of its own that means that the work is launched.
        Raises ModelCorruptError, and ValueError for a row that is larger than a buffer.
        """
        rows_at_once = self._buffers[0].numel() // tensor.row_bytes
        if not rows_at_once:
            raise ValueError(f"a row of {tensor.name} takes {tensor.row_bytes} bytes, more than a staging buffer")
        for first in range(0, tensor.num_rows, rows_at_once):
            num_rows = min(rows_at_once, tensor.num_rows - first)
            yield first, self._send(tensor, first, num_rows).view(num_rows, tensor.row_bytes)

    def _send(self, tensor: Stored, first: int, num_rows: int) -> torch.Tensor:
        index, self._next = self._next, 1 - self._next
        taken = self._sent[index]
        if taken is not None:
            taken.synchronize()
        part = self._buffers[index][: num_rows * tensor.row_bytes]
        self._fill(part, tensor, first, num_rows)
        sent, self._sent[index] = self._transfer.send(part)
        return sent

    def _fill(self, part: torch.Tensor, tensor: Stored, first: int, num_rows: int) -> None:
        row_bytes = tensor.row_bytes
        least_rows = math.ceil(_LEAST_PIECE_BYTES / row_bytes)
        rows = max(math.ceil(num_rows / self._num_readers), least_rows)
        memory = part.numpy().data

        def read(start: int) -> None:
            stop = min(start + rows, num_rows)
            read_rows_into(tensor, memory[start * row_bytes : stop * row_bytes], first + start)

        run: Callable[..., Iterator[None]] = map if rows >= num_rows else self._readers.map
        for _ in run(read, range(0, num_rows, rows)):
            pass
