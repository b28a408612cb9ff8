"""plan_ring for GPUs: as many programs whatever a slot holds, which share out what it says that it holds.

The slot is read over the bus: its counts, then what they count, so that a decode, which changes next to nothing, reads
next to nothing. What the next launch reads is in place when it begins, as with any launch. Knows words; not rows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.clock.triton import host_time, now
from paceline_kernels.plan_ring.ring import PlanRing
from paceline_kernels.step_inputs import PlanColumns

# A new row of 8,192 tokens in 512 blocks takes each program of four warps five turns, reads of the bus that overlap.
_PROGRAMS = 16
_BLOCK = 128
_NUM_WARPS = 4


def read_plan(
    ring: PlanRing, step: torch.Tensor, words: torch.Tensor, num_planned: int, clock: torch.Tensor
) -> PlanColumns:
    plan = PlanColumns(
        rows=torch.empty(num_planned, dtype=torch.int32, device=words.device),
        num_tokens=torch.empty(num_planned, dtype=torch.int32, device=words.device),
    )
    read_plan_kernel[(_PROGRAMS,)](
        ring.counts,
        ring.rows,
        ring.num_tokens,
        ring.places,
        ring.values,
        step,
        words,
        plan.rows,
        plan.num_tokens,
        clock,
        num_planned,
        words.shape[0],
        ring.counts.shape[0],
        ring.rows.shape[1],
        ring.places.shape[1],
        host_time(),
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return plan


def write_words(words: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    if places.shape[0]:
        grid = (triton.cdiv(places.shape[0], _BLOCK),)
        write_words_kernel[grid](words, places, values, words.shape[0], places.shape[0], _BLOCK, num_warps=_NUM_WARPS)


@triton.jit(do_not_specialize=["num_planned", "num_words", "num_slots", "max_planned", "max_words"])
def read_plan_kernel(
    ring_counts,
    ring_rows,
    ring_num_tokens,
    ring_places,
    ring_values,
    step,
    words,
    rows,
    num_tokens,
    clock,
    num_planned,
    num_words,
    num_slots,
    max_planned,
    max_words,
    interpreted,
    BLOCK: tl.constexpr,
):
    """Any number of programs; each does every so-many-th BLOCK of words, and of planned rows."""
    if tl.program_id(0) == 0:
        tl.store(clock, now(interpreted))
    slot = tl.load(step) % num_slots
    begin = tl.program_id(0) * BLOCK
    stride = tl.num_programs(0) * BLOCK
    num_changed = tl.minimum(tl.load(ring_counts + slot * 2), max_words)
    num_rows = tl.load(ring_counts + slot * 2 + 1)
    for first in range(begin, num_planned, stride):
        planned = first + tl.arange(0, BLOCK)
        is_planned = planned < num_rows
        where = slot * max_planned + planned
        row = tl.load(ring_rows + where, mask=is_planned & (planned < num_planned), other=-1)
        count = tl.load(ring_num_tokens + where, mask=is_planned & (planned < num_planned), other=0)
        tl.store(rows + planned, row, mask=planned < num_planned)
        tl.store(num_tokens + planned, count, mask=planned < num_planned)
    ring_places += slot * max_words
    ring_values += slot * max_words
    for first in range(begin, num_changed, stride):
        _write_words(words, ring_places, ring_values, num_words, first, num_changed, BLOCK)


# Both columns lie anywhere in what the host has sent: another alignment must not be another compilation.
@triton.jit(do_not_specialize=["num_words", "count"], do_not_specialize_on_alignment=["places", "values"])
def write_words_kernel(words, places, values, num_words, count, BLOCK: tl.constexpr):
    """A program per BLOCK words."""
    _write_words(words, places, values, num_words, tl.program_id(0) * BLOCK, count, BLOCK)


@triton.jit
def _write_words(words, places, values, num_words, first, count, BLOCK: tl.constexpr):
    word = first + tl.arange(0, BLOCK)
    place = tl.load(places + word, mask=word < count, other=-1)
    value = tl.load(values + word, mask=word < count, other=0)
    tl.store(words + place, value, mask=(place >= 0) & (place < num_words))
