"""take_rows copies rows and refuses indices that name none."""

import pytest
import torch

from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.take_rows import reference, take_rows


def test_take_rows_equals_the_reference():
    table = torch.randn(11, 5, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([10, 0, 3, 3, 7], dtype=torch.int32)
    assert torch.equal(take_rows(table, indices), reference.take_rows(table, indices))
    assert torch.equal(take_rows(table, indices, 3.0), reference.take_rows(table, indices, 3.0))


def test_padding_gives_nan():
    table = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, 3.0):
        ours = take_rows(table, torch.tensor([-1, 2], dtype=torch.int32), scale)
        assert ours[0].isnan().all()
        assert torch.equal(ours[1], table[2] * scale)


def test_no_indices_give_no_rows():
    assert take_rows(torch.zeros(3, 5), torch.zeros(0, dtype=torch.int32)).shape == (0, 5)


@pytest.mark.parametrize("index", [-2, 3, 2**31 - 1])
def test_an_index_outside_of_the_table_is_refused(index):
    """It neither wraps around nor reads what lies behind."""
    with pytest.raises(KernelArgumentError, match="indices must be 0 to 2"):
        take_rows(torch.zeros(3, 5), torch.tensor([0, index], dtype=torch.int32))
