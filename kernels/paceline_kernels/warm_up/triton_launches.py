"""Which kernels are launched, and how: everything that the compiled code depends on, found without compiling any.

Knows what Triton says before it compiles. It refuses to know operations.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton

from paceline_kernels.devices import meta_stands_for_gpu


@dataclass(frozen=True, slots=True, order=True)
class KernelLaunch:
    """A kernel by module and name, and how it is launched: types, alignments, constants, warps, as Triton's JSON."""

    kernel: str
    specialization: str


def launches_of(call: Callable[[], object]) -> list[KernelLaunch]:
    """Those of a call on tensors of torch's device `meta`, each way once, in their order. Nothing is compiled or run.

    For one thread at a time, and where Triton compiles (see `TRITON_INTERPRET`).
    """
    found: dict[KernelLaunch, None] = {}
    with meta_stands_for_gpu(), _told_of_launches(lambda launch: found.setdefault(launch)):
        call()
    return list(found)


@contextmanager
def _told_of_launches(tell: Callable[[KernelLaunch], object]) -> Iterator[None]:
    @dataclass(frozen=True, slots=True)
    class Compilation:
        """One that Triton is about to begin, as it tells a hook. It is true, by which the hook takes it over."""

        key: str
        repr: str
        fn: Any
        compile: dict[str, Any]
        is_manual_warmup: bool
        already_compiled: bool

        def __post_init__(self) -> None:
            tell(KernelLaunch(f"{self.fn.module}.{self.fn.name}", self.compile["specialization_data"]))

    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, Compilation
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before
