"""linear: a matrix product with weights kept [out, in]. Knows float numbers; it refuses to know quantised weights."""

import torch

from paceline_kernels import gpu
from paceline_kernels.arguments import check_tensor, float_type
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.vector import MAX_SLICES

__all__ = ["Splits", "linear", "sum_of_slices", "unrounded_linear"]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    splits: Splits = Splits.EVEN,
    slices: int = 1,
) -> torch.Tensor:
    """x times the transpose of weight, plus the bias.

    x: [num_tokens, in]. weight: [out, in]. bias: [out]. All of one type and contiguous: float32 on a CPU, bfloat16 or
    float16 on a GPU, where sums are float32, and rounded once but for what torch lets its
    library round before (`allow_bf16_reduced_precision_reduction`). Returns [num_tokens, out] of that type, new.
    Batch-invariant on a CPU: a row of the result depends on that row of x alone, bit for bit. On a GPU that holds with
    Splits.FIXED; with Splits.EVEN the product is whichever is fastest for as many rows.
    slices: 1 to MAX_SLICES of equal length. A CPU, and a GPU with Splits.FIXED, sums each and adds these sums as
    `sum_of_slices` does.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    _check(x, weight, bias, slices)
    if is_cpu(x.device):
        from paceline_kernels.linear import cpu

        return cpu.linear(x, weight, bias, slices)
    from paceline_kernels.linear import triton

    return triton.linear(x, weight, bias, splits, slices)


def unrounded_linear(
    x: torch.Tensor, weight: torch.Tensor, slices: int = 1, *, splits: Splits = Splits.FIXED
) -> torch.Tensor:
    """What `linear` sums and has not rounded yet: float32. With Splits.FIXED equal parts of the inputs give the parts
    of one `sum_of_slices`. Raises as `linear` does.
    """
    if is_cpu(x.device):  # its numbers are float32 anyway
        return linear(x, weight, slices=slices)
    _check(x, weight, None, slices)
    from paceline_kernels.linear import triton

    return triton.unrounded_linear(x, weight, slices, splits)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slices: int) -> None:
    if not is_cpu(x.device) and not gpu.has_kernels(x.device):
        raise UnsupportedDeviceError("linear", x.device, gpu.DEVICES)
    dtype = float_type("linear", "x", x)
    check_tensor("linear", "weight", weight, dtype, (None, None))
    check_tensor("linear", "x", x, dtype, (None, weight.shape[1]))
    if bias is not None:
        check_tensor("linear", "bias", bias, dtype, (weight.shape[0],))
    if not 1 <= slices <= MAX_SLICES or x.shape[1] % slices:
        raise KernelArgumentError("linear", f"{x.shape[1]} inputs have 1 to {MAX_SLICES} equal slices, not {slices}")


def sum_of_slices(partials: torch.Tensor) -> torch.Tensor:
    """Adds neighbours, then neighbouring sums; one without a neighbour waits for the next round.

    partials: [num_slices, num_tokens, out], float32. Returns [num_tokens, out]. If their number is a power
    of two, 2, 4 or 8 equal parts may be summed first, and then the parts' sums, with the same bits. Raises
    KernelArgumentError.
    """
    check_tensor("sum_of_slices", "partials", partials, torch.float32, (None, None, None))
    if is_cpu(partials.device):
        from paceline_kernels.linear import cpu

        return cpu.sum_of_slices(partials)
    while len(partials) > 1:  # the sums of torch's own kernels are rounded as ours
        num_pairs = len(partials) // 2
        pairs = partials[0 : 2 * num_pairs : 2] + partials[1 : 2 * num_pairs : 2]
        partials = torch.cat((pairs, partials[2 * num_pairs :])) if len(partials) % 2 else pairs
    return partials[0]
