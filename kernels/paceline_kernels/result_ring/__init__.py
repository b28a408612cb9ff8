"""result_ring: what a step brought its rows, written by the device to where the host looks, the step's number last.

The last launch of a step. The host neither waits for the device nor copies: it looks at the slot of the step that it
expects, or sleeps and looks again, and nothing stands between this step and the next on the device.

Knows rows, tokens and steps; not who planned, nor what becomes of the tokens. Log-probabilities leave by other ways.
"""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor
from paceline_kernels.draws.columns import Advanced, DrawInputs
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.result_ring.ring import ResultRing, RingReader, StepResults, new_ring
from paceline_kernels.sampling.columns import Samples
from paceline_kernels.step_inputs import MAX_PLANNED_ROWS

__all__ = ["ResultRing", "RingReader", "StepResults", "new_ring", "write_results"]


def write_results(
    ring: ResultRing, step: torch.Tensor, advanced: Advanced, draws: DrawInputs, samples: Samples
) -> None:
    """Write what a step brought its planned rows into slot step % num_slots, then, released to the host, its number.

    ring: as `new_ring` makes it, with room for the plan and its draws. step: [1] int64 from 0 on, on the device or in
    pinned memory, so that a captured graph is replayed with the next one. advanced: what `advance_rows` made of these
    draws and samples. A slot is written over whether the host has read it or not: who launches step n has read step
    n - num_slots. Runs on the device of `advanced` without waiting for it.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op, num_planned, num_draws = "write_results", advanced.num_accepted.shape[0], draws.places.shape[0]
    num_slots, max_planned = ring.num_accepted.shape
    check_tensor(op, "step", step, torch.int64, (1,))
    check_tensor(op, "num_accepted", advanced.num_accepted, torch.int32, (num_planned,))
    check_tensor(op, "finish", advanced.finish, torch.uint8, (num_planned,))
    check_tensor(op, "cu_draws", draws.cu_draws, torch.int32, (num_planned + 1,))
    check_tensor(op, "samples.token_ids", samples.token_ids, torch.int32, (num_draws,))
    check_tensor(op, "outcomes", samples.outcomes, torch.int32, (num_draws,))
    check_tensor(op, "ring.steps", ring.steps, torch.int64, (num_slots,))
    check_tensor(op, "ring.num_accepted", ring.num_accepted, torch.int32, (num_slots, max_planned))
    check_tensor(op, "ring.finish", ring.finish, torch.uint8, (num_slots, max_planned))
    check_tensor(op, "ring.problems", ring.problems, torch.uint8, (num_slots, max_planned))
    check_tensor(op, "ring.token_ids", ring.token_ids, torch.int32, (num_slots, None))
    if not 1 <= num_planned <= min(max_planned, MAX_PLANNED_ROWS) or num_draws > ring.token_ids.shape[1]:
        room = f"{min(max_planned, MAX_PLANNED_ROWS)} rows with {ring.token_ids.shape[1]} draws"
        raise KernelArgumentError(op, f"a slot has room for 1 to {room}, not for {num_planned} with {num_draws}")
    if not gpu.has_kernels(advanced.num_accepted.device):
        raise UnsupportedDeviceError(op, advanced.num_accepted.device, gpu.GPU_ONLY)
    from paceline_kernels.result_ring import triton

    triton.write_results(ring, step, advanced, draws, samples)
