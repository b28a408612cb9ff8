"""result_ring in plain Python, one row at a time."""

import torch

from paceline_kernels.draws.columns import Advanced, DrawInputs, FinishCode
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
    with_logprobs: bool = False,
) -> None:
    """See `paceline_kernels.result_ring.write_results`; the time of the end is 0."""
    slot, num_top = int(step) % ring.steps.shape[0], samples.top_token_ids.shape[1]
    num_tokens = 0
    for planned, (accepted, finish) in enumerate(zip(advanced.num_accepted.tolist(), advanced.finish, strict=True)):
        first, end = draws.cu_draws[planned : planned + 2].tolist()
        ring.num_accepted[slot, planned], ring.finish[slot, planned] = accepted, finish
        ring.num_draws[slot, planned] = end - first
        is_problem = finish == FinishCode.ERROR and first + accepted < end
        ring.problems[slot, planned] = samples.outcomes[first + accepted] if is_problem else SampleOutcome.DRAWN
        for draw in range(first, first + accepted):
            ring.token_ids[slot, num_tokens] = samples.token_ids[draw]
            if with_logprobs:
                ring.logprobs[slot, num_tokens] = samples.logprobs[draw]
                ring.top_token_ids[slot, num_tokens, :num_top] = samples.top_token_ids[draw]
                ring.top_logprobs[slot, num_tokens, :num_top] = samples.top_logprobs[draw]
            num_tokens += 1
    ring.stamps[slot] = torch.tensor([*clock.tolist(), 0])
    ring.steps[slot] = step[0]
    step += 1
