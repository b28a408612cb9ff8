"""How long a call takes on a GPU, and what the GPU reaches at all. Knows calls; not what they compute.

Calls are captured in a graph and replayed, so that the host has no part in the time; inputs take turns, so that they
come from memory and not from the second level of the cache, if there are enough of them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch.nn import functional
from triton.testing import do_bench_cudagraph

from gpu_kernels.case import Place
from gpu_kernels.results import Ceilings, Timing

_COPY_BYTES = 2**30
_PRODUCT_SIZE = 8192
_MIN_CALLS = 20  # that are timed together
_REPETITION_MS = 20

_Made = TypeVar("_Made")


class Clock(Protocol):
    """Times calls that take turns."""

    @property
    def max_sets(self) -> int:
        """How many calls with inputs of their own are worth making."""
        ...

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing: ...

    def replayed(self, call: Callable[[], _Made], /) -> _Made:
        """What a call leaves that has been captured and replayed once, see `Way`. It has run before."""
        ...


class CudaClock:
    """By events on the device."""

    max_sets = 128

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing:
        turns = -(-_MIN_CALLS // len(calls))

        def all_calls() -> None:
            for _ in range(turns):
                for call in calls:
                    call()

        torch.cuda.synchronize()  # inputs were made on another stream than the one that is timed
        quartiles = do_bench_cudagraph(all_calls, rep=_REPETITION_MS, quantiles=[0.25, 0.5, 0.75])
        lower, median, upper = (1e3 * ms / (turns * len(calls)) for ms in quartiles)
        return Timing(median, (upper - lower) / median)

    def replayed(self, call: Callable[[], _Made], /) -> _Made:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = call()
        graph.replay()
        torch.cuda.synchronize()
        return made


class RehearsalClock:
    """Calls everything once and makes a time up, where there is no GPU to be timed."""

    max_sets = 1

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing:
        calls[0]()
        return Timing(1.0, 0.0)

    def replayed(self, call: Callable[[], _Made], /) -> _Made:
        return call()


def ceilings(clock: Clock, place: Place, *, copy_bytes: int = _COPY_BYTES, size: int = _PRODUCT_SIZE) -> Ceilings:
    """A kernel that reads so many bytes and writes as many; and products of square matrices of this size, of bfloat16
    and, where a GPU has it, of float8; random numbers in all of them. `copy_` is no kernel: in a graph it becomes a
    node of its own kind, by which an H200 moves 2.8 TB/s where kernels move 4.3.
    """
    source = place.normal(copy_bytes // 4, seed=0, dtype=torch.float32)
    copy = torch.empty_like(source)
    a, b = (place.normal(size, size, seed=seed, dtype=torch.bfloat16) for seed in range(2))
    products = {"product_tflops": lambda: torch.mm(a, b)}
    if place.has_fp8 and place.device.type == "cuda":
        one, whole = torch.ones(1, device=place.device), functional.ScalingType.TensorWise
        rows, columns = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        products["fp8_tflops"] = lambda: functional.scaled_mm(
            rows, columns, one, whole, one, whole, output_dtype=torch.bfloat16, use_fast_accum=True
        )
    copy_us = clock.time([lambda: torch.add(source, 1.0, out=copy)]).us
    rates = {name: 2 * size**3 / clock.time([call]).us / 1e6 for name, call in products.items()}
    return Ceilings(copy_tbps=2 * copy_bytes / copy_us / 1e6, **rates)
