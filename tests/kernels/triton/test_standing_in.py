"""A CPU that stands for a GPU: operations go to the GPU's kernels and take its types; elsewhere nothing changes."""

import pytest
import torch

from kernel_rig.tensors import normal
from paceline_kernels.devices import cpu_stands_for_gpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.linear import linear
from paceline_kernels.scaled_linear import quantize_rows, scaled_linear


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


def test_an_error_ends_it():
    with pytest.raises(ZeroDivisionError), cpu_stands_for_gpu():
        raise ZeroDivisionError
    with pytest.raises(KernelArgumentError):
        linear(normal(1, 4).half(), normal(2, 4).half())
