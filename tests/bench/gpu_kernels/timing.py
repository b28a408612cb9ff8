"""How long a call takes on a GPU, and what the GPU reaches at all. Knows calls; not what they compute.

Calls are captured in a graph and replayed, so that the host has no part in the time; inputs take turns, so that they
come from memory and not from the second level of the cache, if there are enough of them.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.nn import functional

from gpu_kernels.case import Place
from gpu_kernels.results import Ceilings, Timing

_COPY_BYTES = 2**30
_LARGER_COPY = 4
_PRODUCT_SIZE = 8192
_MIN_CALLS = 20  # of one repetition, so that its two events cost little
_MIN_REPETITIONS, _MAX_REPETITIONS = 7, 41
_REPETITIONS_MS = 100.0

_Made = TypeVar("_Made")


class Clock(Protocol):
    """Times calls that take turns."""

    @property
    def max_sets(self) -> int:
        """How many calls with inputs of their own are worth making."""
        ...

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing:
        """The time of one call."""
        ...

    def launched_us(self, call: Callable[[], object]) -> float:
        """The time of one call in no graph, which must be so long that the host's part in it is none."""
        ...

    def replayed(self, call: Callable[[], _Made], /) -> _Made:
        """What a call leaves that has been captured and replayed once, see `Way`. It has run before."""
        ...


class CudaClock:
    """By events on the device."""

    max_sets = 128

    def time(self, calls: Sequence[Callable[[], object]]) -> Timing:
        """See `Clock`. Every call runs once before any is timed, so that what has to be compiled is."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        turns = -(-_MIN_CALLS // len(calls))

        def all_calls() -> None:
            for _ in range(turns):
                for call in calls:
                    call()

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_calls()
        first_ms = _elapsed_ms(graph.replay)
        wanted = int(_REPETITIONS_MS / max(first_ms, 1e-3))
        num_repetitions = min(max(wanted, _MIN_REPETITIONS), _MAX_REPETITIONS)
        us = [1e3 * _elapsed_ms(graph.replay) / (turns * len(calls)) for _ in range(num_repetitions)]
        lower, median, upper = statistics.quantiles(us, n=4)
        return Timing(median, (upper - lower) / median)

    def launched_us(self, call: Callable[[], object]) -> float:
        return statistics.median(1e3 * _elapsed_ms(call) for _ in range(_MIN_REPETITIONS))

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

    def launched_us(self, call: Callable[[], object]) -> float:
        return self.time([call]).us

    def replayed(self, call: Callable[[], _Made], /) -> _Made:
        return call()


def _elapsed_ms(call: Callable[[], object]) -> float:
    event: Any = torch.cuda.Event  # untyped
    start, end = (event(enable_timing=True) for _ in range(2))
    call()  # what is timed is launched while this still runs
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def ceilings(clock: Clock, place: Place, *, copy_bytes: int = _COPY_BYTES, size: int = _PRODUCT_SIZE) -> Ceilings:
    """The faster of two copies, of so many bytes in a graph and of four times as many outside of one (on an H200 these
    were 2.8 and 4.3 TB/s, it is not known why); and products of square matrices of this size, of bfloat16 and, where a
    GPU has it, of float8; random numbers in all of them.
    """
    source = place.integers(256, copy_bytes, seed=0, dtype=torch.uint8)
    a, b = (place.normal(size, size, seed=seed, dtype=torch.bfloat16) for seed in range(2))
    products = {"product_tflops": lambda: torch.mm(a, b)}
    if place.has_fp8 and place.device.type == "cuda":
        one, whole = torch.ones(1, device=place.device), functional.ScalingType.TensorWise
        rows, columns = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        products["fp8_tflops"] = lambda: functional.scaled_mm(
            rows, columns, one, whole, one, whole, output_dtype=torch.bfloat16, use_fast_accum=True
        )
    copy = torch.empty_like(source)
    copy_us = min(clock.time([lambda: copy.copy_(source)]).us, _larger_copy_us(clock, source) / _LARGER_COPY)
    rates = {name: 2 * size**3 / clock.time([call]).us / 1e6 for name, call in products.items()}
    return Ceilings(copy_tbps=2 * copy_bytes / copy_us / 1e6, **rates)


def _larger_copy_us(clock: Clock, source: torch.Tensor) -> float:
    """The time of a copy of the source as often as `_LARGER_COPY` says, in no graph."""
    sources = source.repeat(_LARGER_COPY)
    copies = torch.empty_like(sources)
    return clock.launched_us(lambda: copies.copy_(sources))
