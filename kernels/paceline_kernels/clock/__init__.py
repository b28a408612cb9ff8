"""clock: when the device reached a point of a step, by its own time. Knows nanoseconds; not what they are between."""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError

CLOCK_SIZE = 3


def new_clock(device: torch.device) -> torch.Tensor:
    """[CLOCK_SIZE] int64 zeros: what `read_plan` and `stamp` note, and `write_results` passes on."""
    return torch.zeros(CLOCK_SIZE, dtype=torch.int64, device=device)


def stamp(clock: torch.Tensor, index: int) -> None:
    """Put the device's time, in nanoseconds from any beginning, into clock[index], once what was launched has run.

    clock: as `new_clock` makes it. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("stamp", "clock", clock, torch.int64, (CLOCK_SIZE,))
    if not 0 <= index < CLOCK_SIZE:
        raise KernelArgumentError("stamp", f"a clock has the places 0 to {CLOCK_SIZE - 1}, not {index}")
    if is_cpu(clock.device):
        from paceline_kernels.clock import cpu

        cpu.stamp(clock, index)
    elif gpu.has_kernels(clock.device):
        from paceline_kernels.clock import triton

        triton.stamp(clock, index)
    else:
        raise UnsupportedDeviceError("stamp", clock.device, gpu.DEVICES)
