"""Collectives of ranks by torch's process groups: NCCL's between GPUs, gloo's between CPUs.

Refuses to know whether ranks live, which `group` watches: these libraries wait for half an hour, or for ever.
"""

from datetime import timedelta

import torch
from torch import distributed

from paceline_executor.errors import RankError
from paceline_executor.ranks.memory import GroupMemory
from paceline_kernels.linear import sum_of_slices

_MEETING = timedelta(minutes=10)  # of ranks that start: a rank that does not come is found out earlier, by its watch


class ProcessGroupCollectives:
    """See Collectives. One of a process."""

    def __init__(self, memory: GroupMemory, device: torch.device) -> None:
        """Waits for all ranks. Raises RankError where they cannot reach each other."""
        is_gpu = device.type == "cuda"
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
            store=distributed.FileStore(str(memory.store), memory.degree),  # type: ignore[attr-defined]
            rank=memory.rank,
            world_size=memory.degree,
            timeout=_MEETING,
            device_id=device,
        )

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = torch.empty((self.degree, *part.shape), dtype=part.dtype, device=part.device)
        distributed.all_gather_into_tensor(parts.view(-1), part.contiguous().view(-1))
        return parts

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        if part.dtype == torch.float32:
            return sum_of_slices(self.gather(part))
        part = part.contiguous()
        distributed.all_reduce(part)
        return part
