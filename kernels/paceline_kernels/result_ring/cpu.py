"""result_ring for CPUs: numpy over all planned rows at once, in the calling thread; the step's number last."""

import time

import numpy as np
import torch

from paceline_kernels.clock import CLOCK_SIZE
from paceline_kernels.draws.columns import Advanced, DrawInputs, RowFinish
from paceline_kernels.result_ring.ring import ResultRing
from paceline_kernels.sampling.columns import SampleOutcome, Samples


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
    number = int(step)
    slot, accepted, finish = number % ring.steps.shape[0], advanced.num_accepted.numpy(), advanced.finish.numpy()
    first, end = draws.cu_draws.numpy()[:-1], draws.cu_draws.numpy()[1:]
    num_planned, ends = len(accepted), np.cumsum(accepted)
    num_tokens = int(ends[-1])
    problems = np.full(num_planned, SampleOutcome.DRAWN, dtype=np.uint8)
    failed = (finish == RowFinish.ERROR) & (first + accepted < end)
    problems[failed] = samples.outcomes.numpy()[(first + accepted)[failed]]
    taken = np.arange(num_tokens) + np.repeat(first - ends + accepted, accepted)
    ring.num_accepted.numpy()[slot, :num_planned] = accepted
    ring.num_draws.numpy()[slot, :num_planned] = end - first
    ring.finish.numpy()[slot, :num_planned] = finish
    ring.problems.numpy()[slot, :num_planned] = problems
    ring.token_ids.numpy()[slot, :num_tokens] = samples.token_ids.numpy()[taken]
    if with_logprobs:
        num_top = samples.top_token_ids.shape[1]
        ring.logprobs.numpy()[slot, :num_tokens] = samples.logprobs.numpy()[taken]
        ring.top_token_ids.numpy()[slot, :num_tokens, :num_top] = samples.top_token_ids.numpy()[taken]
        ring.top_logprobs.numpy()[slot, :num_tokens, :num_top] = samples.top_logprobs.numpy()[taken]
    stamps = ring.stamps.numpy()[slot]
    stamps[:CLOCK_SIZE], stamps[CLOCK_SIZE] = clock.numpy(), time.perf_counter_ns()
    ring.steps.numpy()[slot] = number
    step.numpy()[0] = number + 1
