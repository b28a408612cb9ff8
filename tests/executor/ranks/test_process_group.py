"""Sums by a library's process groups, of ranks that meet in memory that they inherit."""

import subprocess
import sys

import numpy as np
import torch

from paceline_executor.ranks.memory import Descriptors
from paceline_kernels.linear import sum_of_slices

DEGREE = 3
RANK = """
import sys, torch
from paceline_executor.ranks.memory import Descriptors, GroupMemory
from paceline_executor.ranks.process_group import ProcessGroupCollectives
from paceline_executor.share import Share
rank, degree = int(sys.argv[1]), int(sys.argv[2])
memory = GroupMemory(Descriptors.from_json(sys.argv[3]), rank, Share(degree))
ranks = ProcessGroupCollectives(memory, torch.device("cpu"))
part = torch.randn(5, 7, generator=torch.Generator().manual_seed(rank))
for dtype in (torch.float32, torch.bfloat16):
    for _ in range(2):
        total = ranks.sum(part.to(dtype))
    sys.stdout.buffer.write(total.float().numpy().tobytes())
"""


def test_float32_is_summed_by_the_tree_and_16_bits_in_any_order():
    descriptors = Descriptors.new(DEGREE)
    arguments = [str(DEGREE), descriptors.json()]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *arguments], stdout=subprocess.PIPE, pass_fds=descriptors.all
        )
        for rank in range(DEGREE)
    ]
    try:
        totals = [np.frombuffer(rank.communicate(timeout=60)[0], np.float32).reshape(2, 5, 7) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        descriptors.close()
    parts = torch.stack([torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)) for rank in range(DEGREE)])
    for exact, rounded in totals:
        np.testing.assert_array_equal(exact, sum_of_slices(parts))
        np.testing.assert_allclose(rounded, parts.sum(0), atol=0.05)
    assert all((rank == totals[0]).all() for rank in totals)
