"""clock for CPUs: the time of the process."""

import time

import torch


def stamp(clock: torch.Tensor, index: int) -> None:
    clock.numpy()[index] = time.perf_counter_ns()
