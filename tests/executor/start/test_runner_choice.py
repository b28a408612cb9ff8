"""Which runner an executor has: what is asked for, or what the machine has a device for; and what it then refuses."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from paceline.process.command import ExitCode
from paceline_executor.config import RunnerKind, parse_config
from paceline_executor.errors import LimitError, MissingDeviceError
from paceline_executor.start.runner_choice import THIS_MACHINE, Gpu, Machine, choose_runner

H100, A100, T4 = Gpu("NVIDIA H100", (9, 0)), Gpu("NVIDIA A100", (8, 0)), Gpu("Tesla T4", (7, 5))


def machine(gpu=None, *, has_triton=True, has_driver=True):
    """A machine with this GPU, or none that torch sees."""
    return Machine(lambda: has_triton, lambda: has_driver, lambda: gpu)


def choose(arguments, of):
    """What the command line comes to there."""
    return choose_runner(parse_config(arguments), of)


@pytest.mark.parametrize("gpu", [H100, A100])
def test_a_gpu_is_used_where_there_is_one(gpu):
    assert choose([], machine(gpu)) is RunnerKind.CUDA
    assert choose(["--runner", "cuda"], machine(gpu)) is RunnerKind.CUDA


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        (machine(H100, has_triton=False), "Triton, .* is not installed"),
        (machine(), "torch sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (machine(has_driver=False), "torch sees no GPU"),
        (machine(T4), "the Tesla T4 has compute capability 7.5, less than 8.0"),
    ],
)
def test_without_a_usable_one_the_cpu_computes_and_a_gpu_that_was_asked_for_is_refused(of, problem):
    assert choose([], of) is RunnerKind.CPU
    with pytest.raises(MissingDeviceError, match=f"--runner cuda cannot be used: {problem}.*, or choose --runner cpu"):
        choose(["--runner", "cuda"], of)


def test_no_test_takes_a_gpu_without_naming_it():
    """Though the machine may have one, with a driver and Triton: this process and those it starts see none."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert choose([], replace(THIS_MACHINE, has_triton=lambda: True, has_driver=lambda: True)) is RunnerKind.CPU


@pytest.mark.parametrize("kind", ["cpu", "twin", "simulated"])
def test_what_is_asked_for_is_not_looked_for(kind):
    asked = []
    of = Machine(*(lambda name=name: asked.append(name) for name in ("triton", "driver", "gpu")))
    assert choose(["--runner", kind], of).value == kind
    assert asked == []


@pytest.mark.parametrize("missing", ["has_triton", "has_driver"])
def test_torch_is_not_asked_where_there_can_be_no_gpu(missing):
    of = machine(H100, **{missing: False})
    unasked = Machine(of.has_triton, of.has_driver, lambda: pytest.fail("torch was imported"))
    assert choose([], unasked) is RunnerKind.CPU


def test_choosing_imports_no_torch_on_a_machine_without_a_driver():
    program = """
import sys
from dataclasses import replace
from paceline_executor.config import parse_config
from paceline_executor.start.runner_choice import THIS_MACHINE, choose_runner
import paceline_executor.start.loading
print(choose_runner(parse_config([]), replace(THIS_MACHINE, has_driver=lambda: False)).value, "torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["cpu", "False"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu-memory-utilization", "0.5"], "--gpu-memory-utilization is for GPUs, and this is --runner cpu"),
        (["--runner", "simulated", "--gpu-memory-utilization", "0.5"], "this is --runner simulated: leave it out"),
        (["--batch-invariant"], "--batch-invariant is for GPUs, .* no result depends on what else runs: leave it out"),
    ],
)
def test_options_of_gpus_are_refused_elsewhere(arguments, sentence):
    """The twin takes them, as it stands for one."""
    with pytest.raises(LimitError, match=sentence):
        choose(arguments, machine())
    of_twin = [argument for argument in arguments if argument not in ("--runner", "simulated")]
    assert choose([*of_twin, "--runner", "twin"], machine()) is RunnerKind.TWIN
    assert choose(of_twin, machine(H100)) is RunnerKind.CUDA


def test_a_gpu_has_no_threads_to_choose():
    """The twin has. Who leaves the choice to this machine may say how many a CPU would take."""
    with pytest.raises(LimitError, match="--num-threads is for CPUs, and this is --runner cuda: leave it out"):
        choose(["--num-threads", "2", "--runner", "cuda"], machine(H100))
    assert choose(["--num-threads", "2"], machine(H100)) is RunnerKind.CUDA
    assert choose(["--num-threads", "2", "--runner", "twin"], machine()) is RunnerKind.TWIN


@pytest.mark.parametrize(("text", "share"), [("0.9", 0.9), ("1", 1.0), ("1.0", 1.0), ("0.000001", 1e-6)])
def test_a_share_is_read_as_written(text, share):
    """Above 0, at most 1."""
    assert parse_config(["--gpu-memory-utilization", text]).gpu_memory_utilization == share


@pytest.mark.parametrize("text", ["0", "0.0", "1.1", "90", "-0.5", "nan", "1e-1", "0.9GiB"])
def test_what_is_no_share_is_refused(text, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_config([f"--gpu-memory-utilization={text}"])
    assert exit_info.value.code == ExitCode.USAGE
    assert "is not a share above 0 and at most 1; write it like 0.9" in " ".join(capsys.readouterr().err.split())
