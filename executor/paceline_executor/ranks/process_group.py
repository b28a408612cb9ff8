"""Collectives of ranks by torch's process groups: NCCL's between GPUs, gloo's between CPUs.

Refuses to know whether ranks live, which `group` watches: these libraries wait for half an hour, or for ever.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from paceline.process.tls_folder import is_loopback
from paceline_executor.config import settle_collectives
from paceline_executor.errors import RankError
from paceline_executor.models.collectives import Collectives
from paceline_executor.ranks.memory import GroupMemory
from paceline_executor.ranks.shared_collectives import SharedMemoryCollectives
from paceline_kernels.linear import sum_of_slices

_MEETING = timedelta(minutes=10)  # of ranks that start: a rank that does not come is found out earlier, by its watch
_WATCH_S = 5.0  # until whoever watches has ended this process, by the name of the rank that was lost
# Newer versions of torch complain of the name that older ones have.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def collectives_of_hosts(memory: GroupMemory) -> Collectives:
    """Of CPUs. Waits for all ranks where there are several nodes. Raises RankError."""
    if memory.store_at is None:
        return SharedMemoryCollectives(memory)
    return ProcessGroupCollectives(memory, torch.device("cpu"))


class ProcessGroupCollectives:
    """See Collectives. One of a process."""

    def __init__(self, memory: GroupMemory, device: torch.device) -> None:
        """Waits for all ranks. Raises RankError where they cannot reach each other."""
        is_gpu = device.type == "cuda"
        settle_collectives(is_one_machine=memory.store_at is None or is_loopback(memory.store_at[0]))
        try:
            self._meet(memory, device if is_gpu else None, "nccl" if is_gpu else "gloo")
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RankError(f"ranks cannot reach each other: {reason}; with NCCL_DEBUG=INFO it says more") from error
        self.rank, self.degree = memory.rank, memory.degree

    @staticmethod
    def _meet(memory: GroupMemory, device: torch.device | None, backend: str) -> None:
        distributed.init_process_group(
            backend,
            store=_store(memory),
            rank=memory.rank,
            world_size=memory.degree,
            timeout=_MEETING,
            device_id=device,
        )

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = torch.empty((self.degree, *part.shape), dtype=part.dtype, device=part.device)
        with _until_named():
            _all_gather(parts.view(-1), part.contiguous().view(-1))
        return parts

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        if part.dtype == torch.float32:
            return sum_of_slices(self.gather(part))
        part = part.contiguous()
        with _until_named():
            distributed.all_reduce(part)
        return part


def _store(memory: GroupMemory) -> Any:  # noqa: ANN401, of untyped classes
    if memory.store_at is None:
        return distributed.FileStore(f"/proc/self/fd/{memory.store}", memory.degree)  # type: ignore[attr-defined]
    host, port = memory.store_at
    own = memory.store if memory.rank == 0 else None
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, memory.degree, own is not None, _MEETING, wait_for_workers=False, master_listen_fd=own
    )


@contextmanager
def _until_named() -> Iterator[None]:
    """A rank that has ended is met here first, by those that it was connected with, and without its name."""
    try:
        yield
    except RuntimeError as error:
        time.sleep(_WATCH_S)
        raise RankError(f"a sum of ranks has failed: {str(error).strip().partition(chr(10))[0]}") from error
