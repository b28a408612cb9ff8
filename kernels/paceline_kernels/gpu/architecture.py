"""The GPU in use, as launch tables know it, and what it cannot do.

Launch tables are constants of the source, one part per architecture, so that nothing is tried out at start-up and a
deployment runs the same code every day. Knows compute capabilities; not which kernel wants what.
"""

import enum
import functools

import torch
import triton

from paceline_kernels.errors import KernelArgumentError

_FIRST_WITH_FP8 = 89
_FIRST_WITH_LESS_MEMORY = 120


class Architecture(enum.IntEnum):
    """The ones with a launch table, by compute capability times ten."""

    SM_80 = 80
    SM_90 = 90


def current() -> Architecture:
    """The architecture of the current device; the newest one where Triton interprets kernels on the CPU."""
    return table_of(_current_capability())


def table_of(capability: int) -> Architecture:
    """Whose launch table a GPU uses: those from 12.0 on have less than half of the shared memory of 9.0 and 10.0."""
    return Architecture.SM_90 if Architecture.SM_90 <= capability < _FIRST_WITH_LESS_MEMORY else Architecture.SM_80


def check_fp8(op: str, *tensors: torch.Tensor) -> None:
    """Raise KernelArgumentError if a tensor is of 8-bit floats and the current device has no arithmetic for them."""
    capability = _current_capability()
    if capability < _FIRST_WITH_FP8 and any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors):
        problem = f"float8_e4m3fn needs compute capability 8.9 or later, and this GPU has {capability / 10}: use int8"
        raise KernelArgumentError(op, problem)


def _current_capability() -> int:
    if triton.knobs.runtime.interpret:
        return Architecture.SM_90
    return _capability(triton.runtime.driver.active.get_current_device())


@functools.cache
def _capability(_device: int) -> int:
    return int(triton.runtime.driver.active.get_current_target().arch)
