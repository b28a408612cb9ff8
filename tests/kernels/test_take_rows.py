"""take_rows copies rows; of indices that name none a CPU refuses those that are no padding."""

import pytest
import torch

from kernel_rig.tensors import int32, normal
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.take_rows import reference, take_rows


@pytest.mark.parametrize("width", [1, pytest.param(63, marks=pytest.mark.slow), 2049])
def test_take_rows_equals_the_reference(place, dtype, width):
    """Padding gives NaN."""
    table, indices = normal(11, width, dtype=dtype), int32(10, 0, 3, 3, -1, 7)
    for scale in (1.0, 3.0):
        ours = take_rows(place(table), place(indices), scale).cpu()
        torch.testing.assert_close(ours, reference.take_rows(table, indices, scale), rtol=0, atol=0, equal_nan=True)


def test_no_indices_give_no_rows(place, exact):
    assert take_rows(place(torch.zeros(3, 5).to(exact)), place(int32())).shape == (0, 5)


@pytest.mark.parametrize("index", [-2, 3, 2**31 - 1])
def test_an_index_outside_of_the_table_is_refused_on_a_cpu(index):
    """It neither wraps around nor reads what lies behind."""
    with pytest.raises(KernelArgumentError, match="indices must be 0 to 2"):
        take_rows(torch.zeros(3, 5), int32(0, index))


@pytest.mark.parametrize("index", [-2, 3, 2**31 - 1])
def test_an_index_outside_of_the_table_gives_nan_on_a_gpu(gpu, place, exact, index):
    """That row alone: a request fails, its neighbours do not."""
    out = take_rows(place(torch.ones(3, 5).to(exact)), place(int32(0, index)))
    assert out.isnan().all(dim=1).tolist() == [False, True]
