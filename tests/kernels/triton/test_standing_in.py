"""A CPU that stands for a GPU: operations go to the GPU's kernels and take its types; elsewhere nothing changes."""

import pytest
import torch

from paceline_kernels.block_copy import block_copy
from paceline_kernels.devices import cpu_stands_for_gpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.linear import linear
from paceline_kernels.rms_norm import rms_norm
from paceline_kernels.scaled_linear import quantize_rows, scaled_linear
from paceline_kernels.take_rows import take_rows
from paceline_kernels.testing.tensors import normal


@pytest.fixture(autouse=True)
def _needs_the_interpreter(gpu, device):
    if device.type != "cpu":
        pytest.skip("kernels are compiled here")


def test_float16_is_computed_only_where_the_cpu_stands_for_a_gpu():
    """As the types of a GPU are: refused before and after."""
    x, weight = normal(3, 64), normal(8, 64) / 8
    narrow = x.half(), weight.half()
    with cpu_stands_for_gpu():
        ours = linear(*narrow)
    assert ours.dtype == torch.float16
    torch.testing.assert_close(ours.float(), linear(x, weight), rtol=1e-2, atol=1e-2)
    with pytest.raises(KernelArgumentError, match=r"x must be torch\.float32, not torch\.float16"):
        linear(*narrow)


def test_what_only_a_gpu_has_is_there():
    """8-bit weights with a scale per row."""
    x, weight = normal(3, 64), quantize_rows(normal(8, 64) / 8, torch.float8_e4m3fn)
    with pytest.raises(UnsupportedDeviceError):
        scaled_linear(x, weight)
    with cpu_stands_for_gpu():
        ours = scaled_linear(x, weight)
    torch.testing.assert_close(ours, x @ (weight.values.float() * weight.scales[:, None]).T, rtol=1e-5, atol=1e-5)


def test_an_index_out_of_range_gives_what_a_gpu_gives():
    """A row of NaN; finding it would mean waiting."""
    table, indices = normal(4, 16), torch.tensor([1, 9], dtype=torch.int32)
    with cpu_stands_for_gpu():
        rows = take_rows(table, indices)
    assert torch.equal(rows[0], table[1])
    assert rows[1].isnan().all()


def test_results_are_those_of_the_cpu():
    """In float32, but for the order of sums."""
    x, weight, blocks = normal(5, 48), normal(48), normal(2, 3, 1, 4, 8)
    source, target = torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    copied = blocks.clone()
    with cpu_stands_for_gpu():
        ours = rms_norm(x, weight, 1e-5)
        block_copy(copied, source, target)
    torch.testing.assert_close(ours, rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-5)
    assert torch.equal(copied[:, 2], blocks[:, 0])
    assert torch.equal(copied[:, :2], blocks[:, :2])


def test_an_error_ends_it():
    with pytest.raises(ZeroDivisionError), cpu_stands_for_gpu():
        raise ZeroDivisionError
    with pytest.raises(KernelArgumentError):
        linear(normal(1, 4).half(), normal(2, 4).half())
