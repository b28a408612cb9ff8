"""result_ring: what a step brought its rows, written by the device to where the host looks, the step's number last.

The last launch of a step. The host neither waits for the device nor copies: it looks at the slot of the step that it
expects, or sleeps and looks again, and nothing stands between this step and the next on the device.

Knows rows, tokens and steps; not who planned, nor what becomes of the tokens.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.clock import CLOCK_SIZE
from paceline_kernels.devices import is_cpu
from paceline_kernels.draws.columns import Advanced, DrawInputs
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.result_ring.ring import NUM_STAMPS, ResultRing, RingReader, StepResults, new_ring
from paceline_kernels.sampling.columns import Samples
from paceline_kernels.step_inputs import MAX_PLANNED_ROWS

__all__ = ["NUM_STAMPS", "ResultRing", "RingReader", "StepResults", "new_ring", "write_results"]


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
    """Write what a step brought its planned rows into slot step % num_slots, then, released to the host, its number,
    and count `step` up by one, in place.

    ring: as `new_ring` makes it, with room for the plan and its draws. step: [1] int64 from 0 on, on the device, so
    that a captured graph is replayed with the next one. advanced: what `advance_rows` made of these draws and samples.
    clock: as `new_clock` makes it; its times are passed on. with_logprobs: also the log-probabilities of accepted
    tokens; what samples leave unset is anything there, too. A slot is written over whether the host has read it or not:
    who launches step n has read step n - num_slots. Runs on the device of `advanced` without waiting for it.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op, device = "write_results", advanced.num_accepted.device
    check_tensor(op, "step", step, torch.int64, (1,))
    check_tensor(op, "clock", clock, torch.int64, (CLOCK_SIZE,))
    if step.device != device:
        raise KernelArgumentError(op, f"step is counted up, so it must be on {device}, not on {step.device}")
    _check_ring(op, ring)
    _check_step(op, ring, advanced, draws, samples, with_logprobs=with_logprobs)
    if is_cpu(device):
        from paceline_kernels.result_ring import cpu

        cpu.write_results(ring, step, advanced, draws, samples, clock, with_logprobs=with_logprobs)
    elif gpu.has_kernels(device):
        from paceline_kernels.result_ring import triton

        triton.write_results(ring, step, advanced, draws, samples, clock, with_logprobs=with_logprobs)
    else:
        raise UnsupportedDeviceError(op, device, gpu.DEVICES)


def _check_ring(op: str, ring: ResultRing) -> None:
    num_slots, max_planned = ring.num_accepted.shape
    max_draws = ring.token_ids.shape[1]
    check_tensor(op, "ring.steps", ring.steps, torch.int64, (num_slots,))
    check_tensor(op, "ring.num_accepted", ring.num_accepted, torch.int32, (num_slots, max_planned))
    check_tensor(op, "ring.num_draws", ring.num_draws, torch.int32, (num_slots, max_planned))
    check_tensor(op, "ring.finish", ring.finish, torch.uint8, (num_slots, max_planned))
    check_tensor(op, "ring.problems", ring.problems, torch.uint8, (num_slots, max_planned))
    check_tensor(op, "ring.token_ids", ring.token_ids, torch.int32, (num_slots, max_draws))
    check_tensor(op, "ring.logprobs", ring.logprobs, torch.float32, (num_slots, max_draws))
    check_tensor(op, "ring.top_token_ids", ring.top_token_ids, torch.int32, (num_slots, max_draws, None))
    check_tensor(op, "ring.top_logprobs", ring.top_logprobs, torch.float32, tuple(ring.top_token_ids.shape))
    check_tensor(op, "ring.stamps", ring.stamps, torch.int64, (num_slots, NUM_STAMPS))


def _check_step(
    op: str, ring: ResultRing, advanced: Advanced, draws: DrawInputs, samples: Samples, *, with_logprobs: bool
) -> None:
    num_planned, num_draws = advanced.num_accepted.shape[0], draws.places.shape[0]
    check_tensor(op, "num_accepted", advanced.num_accepted, torch.int32, (num_planned,))
    check_tensor(op, "finish", advanced.finish, torch.uint8, (num_planned,))
    check_tensor(op, "cu_draws", draws.cu_draws, torch.int32, (num_planned + 1,))
    check_tensor(op, "samples.token_ids", samples.token_ids, torch.int32, (num_draws,))
    check_tensor(op, "outcomes", samples.outcomes, torch.int32, (num_draws,))
    max_planned = min(ring.num_accepted.shape[1], MAX_PLANNED_ROWS)
    if not 1 <= num_planned <= max_planned or num_draws > ring.token_ids.shape[1]:
        room = f"{max_planned} rows with {ring.token_ids.shape[1]} draws"
        raise KernelArgumentError(op, f"a slot has room for 1 to {room}, not for {num_planned} with {num_draws}")
    if with_logprobs:
        num_top, max_logprobs = samples.top_token_ids.shape[1], ring.top_token_ids.shape[2]
        check_tensor(op, "logprobs", samples.logprobs, torch.float32, (num_draws,))
        check_tensor(op, "top_token_ids", samples.top_token_ids, torch.int32, (num_draws, None))
        check_tensor(op, "top_logprobs", samples.top_logprobs, torch.float32, (num_draws, num_top))
        if num_top > max_logprobs:
            problem = f"a slot has room for {max_logprobs} log-probabilities of a draw, not for {num_top}"
            raise KernelArgumentError(op, problem)
