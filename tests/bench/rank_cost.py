"""`python -m rank_cost`: how long rank 0 takes to tell its followers of a step in which all rows decode.

Followers are processes that take apart what is sent, and compute nothing. A step goes every 10 ms.
"""

import argparse
import statistics
import subprocess
import sys
import time

import numpy as np

from paceline_executor.ranks.memory import Descriptors, GroupMemory
from paceline_executor.ranks.messages import decode, encode
from paceline_executor.ranks.ring import BatchRingReader, BatchRingWriter
from paceline_executor.runner.interface import NO_CELLS, NOTHING_DESCRIBED, StepBatch

_STEP_S = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(prog="rank_cost")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--followers", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    descriptors, degree = Descriptors.new(options.followers + 1), options.followers + 1
    memory = GroupMemory(descriptors, 0, degree)
    command = [sys.executable, __file__, "follow"]
    followers = [
        subprocess.Popen([*command, str(rank), str(degree), descriptors.json()], pass_fds=descriptors.all)
        for rank in range(1, degree)
    ]
    try:
        taken = _send(memory, options.rows, options.steps)
    finally:
        for follower in followers:
            follower.kill()
            follower.wait()
    p50, p99 = statistics.median(taken), statistics.quantiles(taken, n=100)[98]
    print(f"{options.rows} decodes to {options.followers} followers: p50 {p50:.1f} us, p99 {p99:.1f} us")


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


def _follow(rank: int, degree: int, descriptors: str) -> None:
    reader = BatchRingReader(GroupMemory(Descriptors.from_json(descriptors), rank, degree))
    while (message := reader.read()) is not None:
        decode(message)


if __name__ == "__main__":
    if sys.argv[1:2] == ["follow"]:
        _follow(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    main()
