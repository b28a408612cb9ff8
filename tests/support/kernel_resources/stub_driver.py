"""A Triton driver that says which GPU there is, and can do nothing else: enough to compile.

Knows the three questions that a launch asks before it compiles. Nothing can be run.
"""

from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget

from paceline_kernels import gpu


@dataclass(frozen=True, slots=True)
class StubDriver:
    """A machine whose only device is a CUDA GPU of a compute capability, times ten."""

    capability: int

    def get_current_device(self) -> int:
        """Its number: another one for each capability, since compiled kernels are kept by it."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0 * device

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", self.capability, 32)


def install(capability: int) -> None:
    """From now on this process compiles for such a GPU, and takes tensors of torch's device `meta` to be on it."""
    triton.runtime.driver.set_active(StubDriver(capability))
    gpu.has_kernels = _is_meta


def _is_meta(device: torch.device) -> bool:
    return device.type == "meta"
