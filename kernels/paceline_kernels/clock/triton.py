"""clock for GPUs: the timer that all multiprocessors share. Interpreted, the host's."""

import time

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


def host_time() -> int | None:
    """What `now` gives where kernels are interpreted; None where they are compiled."""
    return time.perf_counter_ns() if triton.knobs.runtime.interpret else None


def stamp(clock: torch.Tensor, index: int) -> None:
    stamp_kernel[(1,)](clock, host_time(), INDEX=index, num_warps=1)


@triton.jit
def now(interpreted):
    """The time in ns; interpreted: as `host_time` gives it."""
    if interpreted is None:
        return globaltimer()
    else:
        return interpreted


@triton.jit
def stamp_kernel(clock, interpreted, INDEX: tl.constexpr):
    tl.store(clock + INDEX, now(interpreted))
