"""result_ring for CPUs: a compiled call over all planned rows, in the calling thread; the step's number last."""

import time

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.clock import CLOCK_SIZE
from paceline_kernels.compiler import jit
from paceline_kernels.draws.columns import Advanced, DrawInputs, FinishCode
from paceline_kernels.result_ring.ring import ResultRing
from paceline_kernels.sampling.columns import SampleOutcome, Samples

_Int32Array = npt.NDArray[np.int32]
_UInt8Array = npt.NDArray[np.uint8]
_ERROR, _DRAWN = int(FinishCode.ERROR), int(SampleOutcome.DRAWN)  # plain integers for compiled code


def write_results(
    ring: ResultRing,
    step: torch.Tensor,
    advanced: Advanced,
    draws: DrawInputs,
    samples: Samples,
    clock: torch.Tensor,
    *,
    with_logprobs: bool,
) -> None:
    number = int(step.numpy()[0])
    slot, accepted = number % ring.steps.shape[0], advanced.num_accepted.numpy()
    taken = np.empty(draws.places.shape[0], dtype=np.int32)
    num_tokens = fill_slot(
        accepted,
        advanced.finish.numpy(),
        draws.cu_draws.numpy(),
        samples.token_ids.numpy(),
        samples.outcomes.numpy(),
        ring.num_accepted.numpy()[slot],
        ring.num_draws.numpy()[slot],
        ring.finish.numpy()[slot],
        ring.problems.numpy()[slot],
        ring.token_ids.numpy()[slot],
        taken,
    )
    if with_logprobs:
        taken, num_top = taken[:num_tokens], samples.top_token_ids.shape[1]
        ring.logprobs.numpy()[slot, :num_tokens] = samples.logprobs.numpy()[taken]
        ring.top_token_ids.numpy()[slot, :num_tokens, :num_top] = samples.top_token_ids.numpy()[taken]
        ring.top_logprobs.numpy()[slot, :num_tokens, :num_top] = samples.top_logprobs.numpy()[taken]
    stamps = ring.stamps.numpy()[slot]
    stamps[:CLOCK_SIZE], stamps[CLOCK_SIZE] = clock.numpy(), time.perf_counter_ns()
    ring.steps.numpy()[slot] = number
    step.numpy()[0] = number + 1


@jit.compiled_for_python
def fill_slot(
    accepted: _Int32Array,
    finish: _UInt8Array,
    cu_draws: _Int32Array,
    drawn: _Int32Array,
    outcomes: _Int32Array,
    ring_accepted: _Int32Array,
    ring_num_draws: _Int32Array,
    ring_finish: _UInt8Array,
    ring_problems: _UInt8Array,
    ring_token_ids: _Int32Array,
    taken: _Int32Array,
) -> int:
    """The last six are written: `taken` with the draws that became tokens. Returns how many these are."""
    at = 0
    for planned in range(len(accepted)):
        first, end, count = cu_draws[planned], cu_draws[planned + 1], accepted[planned]
        ring_accepted[planned], ring_num_draws[planned] = count, end - first
        ring_finish[planned], ring_problems[planned] = finish[planned], _DRAWN
        if finish[planned] == _ERROR and first + count < end:
            ring_problems[planned] = outcomes[first + count]
        for draw in range(first, first + count):
            ring_token_ids[at], taken[at] = drawn[draw], draw
            at += 1
    return at
