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
class Launch:
    """A kernel by module and name, and how it is launched: types, alignments, constants, warps, as Triton's JSON."""

    kernel: str
    specialization: str


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """Those of a call on tensors of torch's device `meta`, each way once, in their order. Nothing is compiled or run.

    For one thread at a time, and where Triton compiles (see `TRITON_INTERPRET`).
    """
    found: dict[Launch, None] = {}
    with meta_stands_for_gpu(), _told_of_launches(lambda launch: found.setdefault(launch)):
        call()
    return list(found)


@contextmanager
def _told_of_launches(tell: Callable[[Launch], object]) -> Iterator[None]:
    def note(
        *,
        key: str,  # noqa: ARG001  Triton gives all of these by name
        repr: str,  # noqa: A002, ARG001
        fn: Any,  # noqa: ANN401
        compile: dict[str, Any],  # noqa: A002
        is_manual_warmup: bool,  # noqa: ARG001
        already_compiled: bool,  # noqa: ARG001
    ) -> bool:
        tell(Launch(f"{fn.module}.{fn.name}", compile["specialization_data"]))
        return True  # it is not compiled, and so not launched

    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, note
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before
