"""result_ring for GPUs: one program, so that one barrier stands between all that is written and the step's number.

The host's memory is written over the bus, a few kB that nobody on the device waits for. Knows slots; not rows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.clock import CLOCK_SIZE
from paceline_kernels.clock.triton import host_time, now
from paceline_kernels.draws import Advanced, DrawInputs
from paceline_kernels.result_ring import ResultRing
from paceline_kernels.sampling.columns import Samples

# Planned rows that the program's four warps take at a time, and numbers of a table of best tokens.
_ROWS_AT_A_TIME = 256
_TOPS_AT_A_TIME = 1024
_NUM_WARPS = 4
# Of RowFinish.
_ERROR = tl.constexpr(4)


def write_results(
    ring: ResultRing,
    step: torch.Tensor,
    advanced: Advanced,
    draws: DrawInputs,
    samples: Samples,
    clock: torch.Tensor,
    *,
    with_logprobs: bool = False,
) -> None:
    """See `paceline_kernels.result_ring.write_results`."""
    num_top = samples.top_token_ids.shape[1] if with_logprobs else 0
    tops = triton.next_power_of_2(num_top) if num_top else 0
    write_results_kernel[(1,)](
        ring.steps,
        ring.num_accepted,
        ring.num_draws,
        ring.finish,
        ring.problems,
        ring.token_ids,
        ring.logprobs if with_logprobs else None,
        ring.top_token_ids if tops else None,
        ring.top_logprobs if tops else None,
        ring.stamps,
        step,
        advanced.num_accepted,
        advanced.finish,
        draws.cu_draws,
        samples.token_ids,
        samples.outcomes,
        samples.logprobs if with_logprobs else None,
        samples.top_token_ids if tops else None,
        samples.top_logprobs if tops else None,
        clock,
        host_time(),
        advanced.num_accepted.shape[0],
        *ring.num_accepted.shape,
        ring.token_ids.shape[1],
        num_top,
        ring.top_token_ids.shape[2],
        ROWS=max(1, _TOPS_AT_A_TIME // tops) if tops else _ROWS_AT_A_TIME,
        TOPS=tops,
        CLOCK_SIZE=CLOCK_SIZE,
        num_warps=_NUM_WARPS,
    )


@triton.jit(
    do_not_specialize=["num_planned", "num_slots", "max_planned", "max_draws", "num_top", "max_logprobs"],
)
def write_results_kernel(
    ring_steps,
    ring_num_accepted,
    ring_num_draws,
    ring_finish,
    ring_problems,
    ring_token_ids,
    ring_logprobs,  # or None, as its like below: nobody asks for them
    ring_top_token_ids,  # or None, as the next and their likes
    ring_top_logprobs,
    ring_stamps,
    step,
    num_accepted,
    finish,
    cu_draws,
    token_ids,
    outcomes,
    logprobs,
    top_token_ids,
    top_logprobs,
    clock,
    interpreted,
    num_planned,
    num_slots,
    max_planned,
    max_draws,
    num_top,
    max_logprobs,
    ROWS: tl.constexpr,
    TOPS: tl.constexpr,
    CLOCK_SIZE: tl.constexpr,
):
    """The one program takes ROWS planned rows at a time, and goes through their tokens together.

    TOPS: padded num_top, or 0.
    """
    number = tl.load(step)
    slot = number % num_slots
    num_tokens = 0
    for begin in range(0, num_planned, ROWS):
        planned = begin + tl.arange(0, ROWS)
        exists = planned < num_planned
        accepted = tl.load(num_accepted + planned, mask=exists, other=0)
        ended = tl.load(finish + planned, mask=exists, other=0)
        first = tl.load(cu_draws + planned, mask=exists, other=0)
        end = tl.load(cu_draws + planned + 1, mask=exists, other=0)
        # The draw behind those that were taken; a row that had ended has none.
        failed = (ended == _ERROR) & (first + accepted < end)
        problem = tl.load(outcomes + first + accepted, mask=failed, other=0)
        places = slot * max_planned + planned
        tl.store(ring_num_accepted + places, accepted, mask=exists)
        tl.store(ring_num_draws + places, end - first, mask=exists)
        tl.store(ring_finish + places, ended, mask=exists)
        tl.store(ring_problems + places, problem.to(tl.uint8), mask=exists)
        target = slot * max_draws + num_tokens + tl.cumsum(accepted, 0) - accepted
        for draw in range(tl.max(accepted)):
            is_taken = draw < accepted
            tokens = tl.load(token_ids + first + draw, mask=is_taken, other=0)
            tl.store(ring_token_ids + target + draw, tokens, mask=is_taken)
            if ring_logprobs is not None:
                of_tokens = tl.load(logprobs + first + draw, mask=is_taken, other=0.0)
                tl.store(ring_logprobs + target + draw, of_tokens, mask=is_taken)
            if TOPS > 0:
                top = tl.arange(0, TOPS)[None, :]
                is_told = is_taken[:, None] & (top < num_top)
                source = (first + draw)[:, None] * num_top + top
                place = (target + draw)[:, None] * max_logprobs + top
                tl.store(ring_top_token_ids + place, tl.load(top_token_ids + source, mask=is_told), mask=is_told)
                tl.store(ring_top_logprobs + place, tl.load(top_logprobs + source, mask=is_told), mask=is_told)
        num_tokens += tl.sum(accepted)
    for place in tl.static_range(CLOCK_SIZE):
        tl.store(ring_stamps + slot * (CLOCK_SIZE + 1) + place, tl.load(clock + place))
    tl.store(ring_stamps + slot * (CLOCK_SIZE + 1) + CLOCK_SIZE, now(interpreted))
    tl.debug_barrier()  # what all threads wrote comes before what one of them releases
    tl.atomic_xchg(ring_steps + slot, number, sem="release", scope="sys")
    tl.store(step, number + 1)
