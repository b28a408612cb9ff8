"""Compiles kernels where they would be launched, by the way they would take, and reads what came out.

A case calls an operation with tensors of torch's device `meta`, which have shapes and types but no numbers; every
launch on the way is a compilation only. So what is measured is what a GPU would run: the same checks, table,
specialisation and compiler. Knows Triton's launches and the report of cuobjdump; not the operations.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from paceline_kernels.devices import meta_stands_for_gpu

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_USAGE = re.compile(r"Function \S+:\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Resources:
    """What one compiled kernel takes: a thread of it, and of shared memory a program."""

    case: str
    kernel: str
    num_warps: int
    registers: int
    shared_bytes: int  # asked for at the launch
    spilled_bytes: int  # stack and local memory


class TooManyLaunchesError(Exception):
    """A case launched one kernel in two ways, so that its name would not say which one is meant."""


def compile_case(name: str, call: Callable[[], object]) -> Iterator[Resources]:
    """The kernels that a call launches, compiled and measured; each of them once."""
    with launches_compile_only() as compiled:
        call()
    kernels = {id(kernel): kernel for kernel in compiled}.values()
    if len({kernel.metadata.name for kernel in kernels}) < len(kernels):
        raise TooManyLaunchesError(f"{name}: {[kernel.metadata.name for kernel in kernels]}")
    for kernel in kernels:
        metadata = kernel.metadata
        registers, spilled_bytes = _usage(kernel.asm["cubin"])
        yield Resources(name, metadata.name, metadata.num_warps, registers, metadata.shared, spilled_bytes)


@contextmanager
def launches_compile_only() -> Iterator[list[Any]]:
    """While this lasts, every launch compiles and adds the compiled kernel to the list, and nothing runs."""
    compiled: list[Any] = []
    launch = JITFunction.run

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:  # noqa: ANN401, ARG001
        kernel = launch(function, *args, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    JITFunction.run = compile_only
    try:
        with meta_stands_for_gpu():
            yield compiled
    finally:
        JITFunction.run = launch


def _usage(binary: bytes) -> tuple[int, int]:
    """(registers, spilled bytes) of the one kernel in a binary, as the vendor's tool reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ((registers, stack, local),) = _USAGE.findall(report)
    return int(registers), int(stack) + int(local)
