"""How the workers of one parallel region go through many phases without entering a region for each.

Knows counters in memory; not what the phases compute. A phase is a number of pieces that may be done in any order, by
anyone; the next phase begins when all of them are done. Workers claim pieces one by one, each in a range of its own
while that lasts and then in those of others: neighbours in the number of a piece are neighbours in memory, and what a
worker reads in order its core has fetched already. (Two that took every other piece of a matrix read it at half of the
speed.) Nobody waits for a worker, only for pieces: one that the system has put aside, or that never came, costs the
others no more than the piece it holds. That is what lets a step share its cores with other processes. (With a parallel
region per operation everybody waits for everybody at the end of each, 151 times per step of a model of 30 layers.)

Counters lie 64 bytes apart, so that claiming does not disturb those who wait.
"""

import time

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from paceline_kernels.compiler.jit import compiled
from paceline_kernels.compiler.llvm import INT32, INT64, Ir, call, operation
from paceline_kernels.vector import simd

_LINE = 8  # int64 per cache line
_MAX_RANGES = 8  # of the pieces of a phase; more workers share them
# How often a waiting worker looks before it offers its core to other processes: some tens of microseconds.
_NUM_LOOKS = 2000

Counters = npt.NDArray[np.int64]


@operation(types.int64, types.int64, types.int64)
def _add(builder: Ir, address: Ir, count: Ir) -> Ir:
    """Add to the int64 at the address, at once for all workers; returns what it was."""
    return builder.atomic_rmw("add", builder.inttoptr(address, INT64.as_pointer()), count, "acq_rel")


@operation(types.int64, types.int64)
def _read(builder: Ir, address: Ir) -> Ir:
    """The int64 at the address; what its writers wrote before is seen by who reads it."""
    return builder.load_atomic(builder.inttoptr(address, INT64.as_pointer()), "acquire", 8)


@operation(types.void)
def _pause(builder: Ir) -> None:
    """Tell the processor that this is a waiting loop, where it has a word for that."""
    if "x86" in builder.module.triple:
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])


@operation(types.int32)
def _yield(builder: Ir) -> Ir:
    """Let another process have this core, if one waits for it."""
    return call(builder, "sched_yield", INT32, [])


@operation(types.int32, types.int64)
def _put_time(builder: Ir, address: Ir) -> Ir:
    """Put the monotonic clock, seconds and nanoseconds, at the address."""
    return call(builder, "clock_gettime", INT32, [INT32(time.CLOCK_MONOTONIC), address])


def new_counters(count: int) -> Counters:
    """Counters for this many phases, or for other things that are counted together; all zero.

    Each has a line for what is done, and one for what is claimed of each range.
    """
    return np.zeros((count, (1 + _MAX_RANGES) * _LINE), dtype=np.int64)


@compiled
def claim(counters: Counters, index: int, worker: int, num_workers: int, num_pieces: int) -> int:
    """A piece that nobody else gets, 0 to num_pieces - 1; num_pieces when all are taken.

    Worker 0 to num_workers - 1 gets those of its range in order, then what is left of the following ones.
    """
    num_ranges = min(num_workers, _MAX_RANGES)
    for i in range(num_ranges):
        taken = (worker + i) % num_ranges
        first, end = taken * num_pieces // num_ranges, (taken + 1) * num_pieces // num_ranges
        claimed = _address(counters, index) + 8 * _LINE * (1 + taken)
        if first + _read(claimed) < end:
            piece = first + _add(claimed, 1)
            if piece < end:
                return int(piece)
    return num_pieces


@compiled
def finish(counters: Counters, index: int, count: int) -> int:
    """Say that so many pieces are done; returns how many were before."""
    return _add(_address(counters, index), count)  # type: ignore[no-any-return]


@compiled
def reset(counters: Counters, index: int) -> None:
    """Begin to count from 0 again; for the one who knows that nobody else counts now."""
    counters[index] = 0


@compiled
def meet(counters: Counters, index: int, count: int, num_pieces: int) -> None:
    """Say that so many pieces are done; return when all are."""
    finish(counters, index, count)
    done = _address(counters, index)
    looks = 0
    while _read(done) < num_pieces:
        _pause()
        looks += 1
        if looks % _NUM_LOOKS == 0:
            _yield()


@compiled
def stamp(times: Counters, index: int, worker: int) -> None:
    """times: [count, 2] of int64, or empty; [index] becomes worker 0's time by the monotonic clock: s, ns."""
    if worker == 0 and times.shape[0] > 0:
        _put_time(simd.address(times) + 16 * index)


@compiled
def _address(counters: Counters, index: int) -> int:
    """Of what is done; what is claimed of each range follows."""
    return simd.address(counters) + 8 * index * int(counters.shape[1])
