"""`python -m rank_cost`: what ranks cost where nothing is computed.

How long rank 0 takes to tell its followers of a step in which all rows decode: they are processes that take apart what
is sent, a step every 10 ms. With `--step-ms`, what share of the time a device of two ranks waits for its next step,
beside one of one rank: their steps take so long.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from gpu.feed import Feed, Step, prompts_of, times_ms
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.models.interface import ForwardInputs, KvCache
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.ranks.guard import DrawGuard, Posts
from paceline_executor.ranks.memory import Descriptors, GroupMemory
from paceline_executor.ranks.messages import Message, decode, encode
from paceline_executor.ranks.ranked_runner import FollowingRank, RankedRunner
from paceline_executor.ranks.ring import BatchRingReader, BatchRingWriter
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuModel
from paceline_executor.runner.device.host_device import HostDevice
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.interface import NO_CELLS, NOTHING_DESCRIBED, Runner, StepBatch
from paceline_executor.share import Share
from paceline_kernels.decoder import AuxHidden, PhaseTime
from random_models import TINY_CONFIG

_STEP_S = 0.01
_ROUNDS, _WARM_STEPS = 3, 20
_MAX_LEN = 1024


class _IdleModel:
    """See LanguageModel: it takes its time."""

    vocabulary = None

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def forward(
        self,
        inputs: ForwardInputs,
        kv_cache: KvCache,  # noqa: ARG002
        *,
        aux: AuxHidden | None = None,  # noqa: ARG002
        times: list[PhaseTime] | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        time.sleep(self._step_s)
        return torch.zeros(inputs.logit_tokens.numel(), TINY_CONFIG.vocab_size)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def main() -> None:
    parser = argparse.ArgumentParser(prog="rank_cost")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--followers", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-ms", type=float)
    options = parser.parse_args()
    if options.step_ms is None:
        with _group(options.followers, "read") as memory:
            taken = _send(memory, options.rows, options.steps)
        p50, p99 = statistics.median(taken), statistics.quantiles(taken, n=100)[98]
        print(f"{options.rows} decodes to {options.followers} followers: p50 {p50:.1f} us, p99 {p99:.1f} us")
        return
    with _group(1, "step", str(options.rows), str(options.step_ms)) as memory:
        own = _runner(options.rows, options.step_ms)
        writer = BatchRingWriter(memory)
        of_two = RankedRunner(own, own.kv_geometry, lambda one: writer.write(encode(one)), DrawGuard(memory))
        runners: dict[int, Runner] = {1: _runner(options.rows, options.step_ms), 2: of_two}
        waits: dict[int, list[float]] = {degree: [] for degree in runners}
        for _ in range(_ROUNDS):
            for degree, runner in runners.items():
                waits[degree].append(_waiting(runner, options.rows, options.steps, options.step_ms))
    one, two = (100 * statistics.median(waits[degree]) for degree in runners)
    print(f"steps of {options.step_ms:g} ms and {options.rows} rows: one rank waits {one:.2f} %, two {two:.2f} %")


@contextmanager
def _group(num_followers: int, *work: str) -> Iterator[GroupMemory]:
    descriptors, degree = Descriptors.new(num_followers + 1), num_followers + 1
    command = [sys.executable, __file__, "follow"]
    followers = [
        subprocess.Popen([*command, str(rank), str(degree), descriptors.json(), *work], pass_fds=descriptors.all)
        for rank in range(1, degree)
    ]
    try:
        yield GroupMemory(descriptors, 0, Share(degree))
    finally:
        for follower in followers:
            follower.kill()
            follower.wait()


def _send(memory: GroupMemory, num_rows: int, num_steps: int) -> list[float]:
    """In microseconds of the thread that sends. The first steps, during which followers start, do not count."""
    writer, rows, taken = BatchRingWriter(memory), np.arange(num_rows, dtype=np.int32), []
    while memory.read[1:].min() == 0:
        _write(writer, rows, 1)
        time.sleep(0.5)
    for step in range(num_steps):
        begun = time.perf_counter()
        _write(writer, rows, step)
        taken.append(1e6 * (time.perf_counter() - begun))
        time.sleep(_STEP_S)
    return taken


def _write(writer: BatchRingWriter, rows: np.ndarray, step: int) -> None:
    ones = np.ones_like(rows)
    writer.write(encode(StepBatch(rows, ones, rows + step, rows, NOTHING_DESCRIBED, NO_CELLS)))


def _limits(num_rows: int) -> RowLimits:
    return RowLimits(num_rows, _MAX_LEN, max(64, num_rows), num_rows * _MAX_LEN // 64, 64, TINY_CONFIG.vocab_size)


def _runner(num_rows: int, step_ms: float) -> DeviceRunner:
    model = CpuModel(HostDevice(1), _IdleModel(step_ms / 1e3), TINY_CONFIG, FLOAT32_NUMERICS)
    return model.runner(_limits(num_rows))


def _waiting(runner: Runner, num_rows: int, num_steps: int, step_ms: float) -> float:
    """The share of the time, over steps in which all rows decode."""
    feed = Feed(Engine(RowTable(_limits(num_rows)), runner))
    for prompt in prompts_of(TINY_CONFIG, [2] * num_rows):
        feed.add(prompt, num_steps + _WARM_STEPS)
    steps: list[Step] = []
    feed.run(steps.append)
    taken_ms = times_ms([step for step in steps if step.num_rows == num_rows][_WARM_STEPS:])
    return 1 - step_ms / statistics.mean(taken_ms)


def _follow(rank: int, degree: int, descriptors: str, work: str, *sizes: str) -> None:
    memory = GroupMemory(Descriptors.from_json(descriptors), rank, Share(degree))
    reader = BatchRingReader(memory)

    def read(timeout_s: float | None = None) -> Message | None:
        message = reader.read(timeout_s)
        return None if message is None else decode(message)

    if work == "step":
        FollowingRank(_runner(int(sizes[0]), float(sizes[1])), Posts(memory)).follow(read)
    while read() is not None:
        pass


if __name__ == "__main__":
    if sys.argv[1:2] == ["follow"]:
        _follow(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    main()
