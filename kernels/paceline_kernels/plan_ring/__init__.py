"""plan_ring: how a step's plan reaches the device: from memory that the host writes and the device reads.

The first launch of a step. What the host knows better than the device (a new row's columns, blocks, tokens of a prompt)
comes as words: every column of rows is a view of one flat tensor, so that one kernel applies whatever has changed.
Nothing is copied, and nothing on the host waits: a slot is written while steps before it run.

Knows words and planned rows; not what a word stands for, nor who planned.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.clock import CLOCK_SIZE
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.plan_ring.ring import PlanRing, PlanWriter, new_plan_ring
from paceline_kernels.step_inputs import MAX_PLANNED_ROWS, PlanColumns

__all__ = ["PlanRing", "PlanWriter", "new_plan_ring", "read_plan", "write_words"]


def read_plan(
    ring: PlanRing, step: torch.Tensor, words: torch.Tensor, num_planned: int, clock: torch.Tensor
) -> PlanColumns:
    """Change the words that slot step % num_slots names, note the time in clock[0], and return what the slot plans.

    ring: as `new_plan_ring` makes it, of a slot that was written. step: [1] int64 from 0 on, on the device. words:
    [num_words] int32; a place outside of it is skipped. num_planned: of planned rows with their padding, whose row is
    -1 with 0 tokens; what a slot names beyond them is not planned. clock: as `new_clock` makes it.
    Runs on the device of `words` without waiting for it: a captured graph is replayed with any slot.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op, num_slots = "read_plan", ring.counts.shape[0]
    check_tensor(op, "ring.counts", ring.counts, torch.int32, (num_slots, 2))
    check_tensor(op, "ring.rows", ring.rows, torch.int32, (num_slots, None))
    check_tensor(op, "ring.num_tokens", ring.num_tokens, torch.int32, tuple(ring.rows.shape))
    check_tensor(op, "ring.places", ring.places, torch.int32, (num_slots, None))
    check_tensor(op, "ring.values", ring.values, torch.int32, tuple(ring.places.shape))
    check_tensor(op, "step", step, torch.int64, (1,))
    check_tensor(op, "words", words, torch.int32, (None,))
    check_tensor(op, "clock", clock, torch.int64, (CLOCK_SIZE,))
    if not 1 <= num_planned <= min(ring.rows.shape[1], MAX_PLANNED_ROWS):
        most = min(ring.rows.shape[1], MAX_PLANNED_ROWS)
        raise KernelArgumentError(op, f"a slot has room for 1 to {most} rows, not for {num_planned}")
    if is_cpu(words.device):
        from paceline_kernels.plan_ring import cpu

        return cpu.read_plan(ring, step, words, num_planned, clock)
    if gpu.has_kernels(words.device):
        from paceline_kernels.plan_ring import triton

        return triton.read_plan(ring, step, words, num_planned, clock)
    raise UnsupportedDeviceError(op, words.device, gpu.DEVICES)


def write_words(words: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    """words[places[i]] = values[i] for every i, in place: for what a slot has no room for.

    words: [num_words] int32. places, values: [count] int32, of which no two places are alike, and those outside of
    `words` are skipped; on its device, or in pinned host memory, which must not be written again before this has run.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op = "write_words"
    check_tensor(op, "words", words, torch.int32, (None,))
    check_tensor(op, "places", places, torch.int32, (None,))
    check_tensor(op, "values", values, torch.int32, (places.shape[0],))
    if is_cpu(words.device):
        from paceline_kernels.plan_ring import cpu

        cpu.write_words(words, places, values)
    elif gpu.has_kernels(words.device):
        from paceline_kernels.plan_ring import triton

        if not all(column.device == words.device or column.is_pinned() for column in (places, values)):
            raise KernelArgumentError(op, "places and values must be on the device of words, or in pinned host memory")
        triton.write_words(words, places, values)
    else:
        raise UnsupportedDeviceError(op, words.device, gpu.DEVICES)
