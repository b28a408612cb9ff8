"""result_ring for GPUs: one program, so that one barrier stands between all that is written and the step's number.

The host's memory is written over the bus, a few kB that nobody on the device waits for. Knows slots; not rows.
"""

import torch
import triton
import triton.language as tl

from paceline_kernels.draws import Advanced, DrawInputs
from paceline_kernels.result_ring import ResultRing
from paceline_kernels.sampling.columns import Samples

# Planned rows of a warp: eight of each thread.
_ROWS_OF_A_WARP = 256
_MIN_WARPS = 4
# Of RowFinish.
_ERROR = tl.constexpr(4)


def write_results(
    ring: ResultRing, step: torch.Tensor, advanced: Advanced, draws: DrawInputs, samples: Samples
) -> None:
    """See `paceline_kernels.result_ring.write_results`."""
    num_planned = advanced.num_accepted.shape[0]
    padded = max(16, triton.next_power_of_2(num_planned))
    write_results_kernel[(1,)](
        ring.steps,
        ring.num_accepted,
        ring.finish,
        ring.problems,
        ring.token_ids,
        step,
        advanced.num_accepted,
        advanced.finish,
        draws.cu_draws,
        samples.token_ids,
        samples.outcomes,
        num_planned,
        *ring.num_accepted.shape,
        ring.token_ids.shape[1],
        PLANNED=padded,
        num_warps=max(_MIN_WARPS, padded // _ROWS_OF_A_WARP),
    )


# The number lies anywhere in what the host has sent: another alignment must not be another compilation.
@triton.jit(
    do_not_specialize=["num_planned", "num_slots", "max_planned", "max_draws"],
    do_not_specialize_on_alignment=["step"],
)
def write_results_kernel(
    ring_steps,
    ring_num_accepted,
    ring_finish,
    ring_problems,
    ring_token_ids,
    step,
    num_accepted,
    finish,
    cu_draws,
    token_ids,
    outcomes,
    num_planned,
    num_slots,
    max_planned,
    max_draws,
    PLANNED: tl.constexpr,
):
    """The one program has all planned rows, PLANNED with their padding, and goes through their tokens together."""
    number = tl.load(step)
    slot = number % num_slots
    planned = tl.arange(0, PLANNED)
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
    tl.store(ring_finish + places, ended, mask=exists)
    tl.store(ring_problems + places, problem.to(tl.uint8), mask=exists)
    begins = slot * max_draws + tl.cumsum(accepted, 0) - accepted
    for draw in range(tl.max(accepted)):
        is_taken = draw < accepted
        tokens = tl.load(token_ids + first + draw, mask=is_taken, other=0)
        tl.store(ring_token_ids + begins + draw, tokens, mask=is_taken)
    tl.debug_barrier()  # what all threads wrote comes before what one of them releases
    tl.atomic_xchg(ring_steps + slot, number, sem="release", scope="sys")
