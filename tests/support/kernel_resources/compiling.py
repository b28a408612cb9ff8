"""Compiles kernels where they would be launched, by the way they would take, and reads what came out.

A case calls an operation with tensors of torch's device `meta`, which have shapes and types but no numbers; every
launch on the way is a compilation only. So what is measured is what a GPU would run: the same checks, table,
specialisation and compiler. Knows Triton's launches and the report of cuobjdump; not the operations.
"""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from kernel_resources.case import Case
from paceline_kernels.devices import meta_stands_for_gpu
from paceline_kernels.warm_up.triton_kernels import KERNELS
from paceline_kernels.warm_up.triton_launches import KernelLaunch, launches_of

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_USAGE = re.compile(r"Function \S+:\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Resources:
    """What one compiled kernel takes: a thread of it, and of shared memory a program.

    code: digest of all that it was compiled from; the same code takes the same.
    """

    case: str
    kernel: str
    num_warps: int
    registers: int
    shared_bytes: int  # asked for at the launch
    spilled_bytes: int  # stack and local memory
    code: str


class TooManyLaunchesError(Exception):
    """A case launched one kernel in two ways, so that its name would not say which one is meant."""


def resources_of(cases: Iterable[Case], known: Sequence[Resources] = ()) -> Iterator[Resources]:
    """What the kernels take that are launched; compiled only where `known` lacks what they are compiled from."""
    # All of these before the first is compiled, which would be run from then on.
    for case, codes in [(case, _codes(case)) for case in cases]:
        same = [row for row in known if row.case == case.name and row.code == codes.get(row.kernel)]
        yield from same if len(same) == len(codes) else _compile(case, codes)


def _codes(case: Case) -> dict[str, str]:
    return {launch.kernel.rpartition(".")[2]: _code(launch) for launch in launches_of(case.call)}


def _code(launch: KernelLaunch) -> str:
    # A library that is linked is named by its path, which every environment has elsewhere.
    specialization = launch.specialization.replace(str(Path(triton.__file__).parent), "")
    parts = (KERNELS[launch.kernel].cache_key, specialization, triton.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _compile(case: Case, codes: Mapping[str, str]) -> Iterator[Resources]:
    with launches_compile_only() as compiled:
        case.call()
    kernels = {id(kernel): kernel for kernel in compiled}.values()
    if len({kernel.metadata.name for kernel in kernels}) < len(kernels):
        raise TooManyLaunchesError(f"{case.name}: {[kernel.metadata.name for kernel in kernels]}")
    for kernel in kernels:
        metadata = kernel.metadata
        registers, spilled_bytes = _usage(kernel.asm["cubin"])
        code = codes[metadata.name]
        yield Resources(case.name, metadata.name, metadata.num_warps, registers, metadata.shared, spilled_bytes, code)


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
