"""Memory in which kernels are tested: what does not run where they do gets memory as ever."""

import torch

from kernel_rig.bounds import BoundedMemory


def test_a_reference_on_another_device_makes_its_own_memory(gpu, place):
    ours, elsewhere = place(torch.zeros(1)), torch.device("meta")
    assert torch.empty(2, 3, dtype=torch.int32, device=elsewhere).device == elsewhere
    assert torch.empty((2,), dtype=torch.float32, device=ours.device).isnan().all()


def test_what_runs_beside_a_gpu_gets_memory_as_ever():
    beside = BoundedMemory(torch.device("meta"))
    assert beside.empty(2, 3, dtype=torch.int32).shape == (2, 3)
    assert beside.empty((2, 3), dtype=torch.int32, device=torch.device("cpu")).device.type == "cpu"
