"""A Triton driver that says for which GPU to compile, and can do nothing else: so compilers take no GPU, nor need one.

Apart from `architecture`, which asks the driver there is. Knows the three questions that come before a compilation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget

_WARP_SIZE = 32


@dataclass(frozen=True, slots=True)
class NoGpu:
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
        return GPUTarget("cuda", self.capability, _WARP_SIZE)


def compile_for(capability: int) -> None:
    """From now on this process compiles for such a GPU, and launches nothing."""
    triton.runtime.driver.set_active(NoGpu(capability))


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """The same for a while. What is launched meanwhile finds no kernel that was launched before on a real device, where
    it would run: by its number, 90 say, this one has none.
    """
    drivers = triton.runtime.driver
    before = drivers._active  # noqa: SLF001  asking for `active` would look for a GPU
    drivers.set_active(NoGpu(capability))
    try:
        yield
    finally:
        drivers.set_active(before)
