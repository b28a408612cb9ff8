"""CPU runners for tests: of a checkpoint, on a thread that all tests of a process share.

Only one thread of a process may own its OpenMP team.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from paceline_executor.limits import RowLimits
from paceline_executor.numerics import FLOAT32_NUMERICS, Numerics
from paceline_executor.runner.cpu import CpuModel
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.device.host_device import HostDevice
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.weights import Checkpoint

NUM_ROWS = 64
MAX_TOKENS = 1024  # of a step


@dataclass(frozen=True, slots=True)
class CpuRig:
    """limits: of the runner's rows."""

    model: CpuModel
    limits: RowLimits
    runner: DeviceRunner


@functools.cache
def shared_device(num_threads: int = 1) -> HostDevice:
    return HostDevice(num_threads)


def cpu_rig(
    checkpoint: Checkpoint,
    *,
    num_blocks: int,
    block_size: int,
    numerics: Numerics = FLOAT32_NUMERICS,
    num_threads: int = 1,
    max_drafts: int = 0,
    drafting: Callable[[CpuModel, RowLimits], MakeDrafting] | None = None,
) -> CpuRig:
    """drafting: None is prompt lookup, with drafts."""
    config = checkpoint.config
    longest = min(num_blocks * block_size, config.max_model_len)
    model = CpuModel.read(shared_device(num_threads), checkpoint, numerics, longest)
    limits = RowLimits(NUM_ROWS, longest, MAX_TOKENS, num_blocks, block_size, config.vocab_size, max_drafts)
    runner = model.runner(limits, None if drafting is None else drafting(model, limits))
    return CpuRig(model, limits, runner)


def cpu_runner(
    checkpoint: Checkpoint, *, num_blocks: int, block_size: int, numerics: Numerics = FLOAT32_NUMERICS
) -> DeviceRunner:
    """Without drafts."""
    return cpu_rig(checkpoint, num_blocks=num_blocks, block_size=block_size, numerics=numerics).runner
