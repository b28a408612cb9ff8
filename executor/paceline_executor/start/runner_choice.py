"""Which runner an executor has: what is asked for, or what this machine has a device for.

Refuses to import torch, which takes seconds, before a driver says that there may be a GPU.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline_executor.config import Config, DrafterKind, RunnerKind
from paceline_executor.errors import LimitError, MissingDeviceError
from paceline_executor.numerics import Quantization

_LEAST_CAPABILITY = (8, 0)
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of Linux, of its subsystem on Windows


@dataclass(frozen=True, slots=True)
class Gpu:
    """The one that torch uses."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Machine:
    """`gpu` takes seconds, the others nothing."""

    has_triton: Callable[[], bool]
    has_driver: Callable[[], bool]
    gpu: Callable[[], Gpu | None]


def _gpu_of_torch() -> Gpu | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


THIS_MACHINE = Machine(
    has_triton=lambda: importlib.util.find_spec("triton") is not None,
    has_driver=lambda: any(path.exists() for path in _DRIVER_FILES),
    gpu=_gpu_of_torch,
)


def choose_runner(config: Config, machine: Machine = THIS_MACHINE) -> RunnerKind:
    """Never returns `auto`.

    Raises MissingDeviceError for a GPU that cannot be used, LimitError for options that the runner does not take.
    """
    kind = config.runner
    if kind is RunnerKind.AUTO:
        kind = RunnerKind.CPU if _why_no_gpu(machine) else RunnerKind.CUDA
    elif kind is RunnerKind.CUDA:
        problem = _why_no_gpu(machine)
        if problem:
            raise MissingDeviceError(f"--runner cuda cannot be used: {problem}, or choose --runner cpu")
    _check_options(config, kind)
    return kind


def _why_no_gpu(machine: Machine) -> str:
    """What is missing and what to do about it; empty if nothing is."""
    if not machine.has_triton():
        return "Triton, which compiles its kernels, is not installed: install torch for CUDA, which brings it"
    gpu = machine.gpu() if machine.has_driver() else None
    if gpu is None:
        return "torch sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES, and install torch for CUDA"
    if gpu.capability < _LEAST_CAPABILITY:
        least, capability = (".".join(map(str, version)) for version in (_LEAST_CAPABILITY, gpu.capability))
        return f"the {gpu.name} has compute capability {capability}, less than {least}: take another GPU"
    return ""


def _check_options(config: Config, kind: RunnerKind) -> None:
    is_for_gpu = kind in (RunnerKind.CUDA, RunnerKind.TWIN)
    if config.gpu_memory_utilization is not None and not is_for_gpu:
        raise LimitError(f"--gpu-memory-utilization is for GPUs, and this is --runner {kind.value}: leave it out")
    if config.batch_invariant and not is_for_gpu:
        sentence = f"--batch-invariant is for GPUs, and this is --runner {kind.value}"
        raise LimitError(f"{sentence}, where no result depends on what else runs: leave it out")
    drafter = config.speculation.drafter
    if config.tensor_parallel_size > 1:
        _check_ranks(config, kind)
    if kind is not RunnerKind.CPU and drafter is not DrafterKind.PROMPT_LOOKUP:
        _check_drafter(config, drafter, kind, is_for_gpu=is_for_gpu)
    if config.num_threads is not None and config.runner is RunnerKind.CUDA:  # `auto` may find no GPU
        raise LimitError("--num-threads is for CPUs, and this is --runner cuda: leave it out")


def _check_ranks(config: Config, kind: RunnerKind) -> None:
    size = f"--tensor-parallel-size {config.tensor_parallel_size}"
    if kind is RunnerKind.SIMULATED:
        raise LimitError(f"{size} is for models, and this is --runner simulated: leave it out")
    if kind is RunnerKind.CPU and config.quantization is not Quantization.NONE:
        raise LimitError(f"{size} is on a CPU for --quantization none: choose it, or leave --tensor-parallel-size out")
    if kind is RunnerKind.CPU and config.speculation.drafter is not DrafterKind.PROMPT_LOOKUP:
        drafter = config.speculation.drafter.value
        raise LimitError(f"{size} does not go with --speculation {drafter} on a CPU: leave one out")


def _check_drafter(config: Config, drafter: DrafterKind, kind: RunnerKind, *, is_for_gpu: bool) -> None:
    if not is_for_gpu:
        raise LimitError(f"--speculation {drafter.value} is for --runner cpu, and this is {kind.value}: leave it out")
    if config.batch_invariant:
        raise LimitError(
            f"--speculation {drafter.value} does not go with --batch-invariant, which drafts nothing: leave it out"
        )
