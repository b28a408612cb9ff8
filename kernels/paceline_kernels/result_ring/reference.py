"""result_ring in plain Python, one row at a time."""

import torch

from paceline_kernels.draws.columns import Advanced, DrawInputs, RowFinish
from paceline_kernels.result_ring.ring import ResultRing
from paceline_kernels.sampling.columns import SampleOutcome, Samples


def write_results(
    ring: ResultRing, step: torch.Tensor, advanced: Advanced, draws: DrawInputs, samples: Samples
) -> None:
    """See `paceline_kernels.result_ring.write_results`."""
    slot = int(step) % ring.steps.shape[0]
    num_tokens = 0
    for planned, (accepted, finish) in enumerate(zip(advanced.num_accepted.tolist(), advanced.finish, strict=True)):
        first, end = draws.cu_draws[planned : planned + 2].tolist()
        ring.num_accepted[slot, planned], ring.finish[slot, planned] = accepted, finish
        is_problem = finish == RowFinish.ERROR and first + accepted < end
        ring.problems[slot, planned] = samples.outcomes[first + accepted] if is_problem else SampleOutcome.DRAWN
        ring.token_ids[slot, num_tokens : num_tokens + accepted] = samples.token_ids[first : first + accepted]
        num_tokens += accepted
    ring.steps[slot] = step[0]
