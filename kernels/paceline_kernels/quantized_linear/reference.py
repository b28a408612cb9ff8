"""quantized_linear in plain torch: the same integers, summed over the groups in float64."""

import torch

from paceline_kernels.quantized_linear.packing import PackedWeight, WeightFormat

_GROUP, _TILE = 32, 16


def unpack(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers [outputs, groups, 32], scales and minima [outputs, groups], all float64, read from the layout."""
    num_groups = weight.num_inputs // _GROUP
    groups = weight.data.view(weight.data.shape[0], num_groups, -1)  # [tiles, groups, bytes]
    num_bytes = _GROUP * _TILE // (2 if weight.format is WeightFormat.INT4 else 1)
    columns = groups[:, :, num_bytes:].contiguous().view(torch.float16).double()  # [tiles, groups, 16 or 32]
    if weight.format is WeightFormat.INT4:
        quads = groups[:, :, :num_bytes].reshape(*groups.shape[:2], 8, 8, 4)
        integers = torch.stack((quads & 15, quads >> 4), dim=3)  # [tiles, groups, quads, halves, 8, 4]
        minima = columns[:, :, _TILE:]
    else:
        integers = groups[:, :, :num_bytes].contiguous().view(torch.int8).reshape(*groups.shape[:2], 8, 2, 8, 4)
        minima = torch.zeros_like(columns)
    ordered = integers.permute(0, 3, 4, 1, 2, 5).reshape(-1, num_groups, _GROUP).double()
    by_output = [part.transpose(1, 2).reshape(-1, num_groups) for part in (columns[:, :, :_TILE], minima)]
    kept = weight.num_outputs
    return ordered[:kept], by_output[0][:kept], by_output[1][:kept]


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers [tokens, groups, 32] and scales [tokens, groups] of float32 rows, in float32 as the contract says."""
    groups = x.view(x.shape[0], -1, _GROUP)
    largest = groups.abs().amax(dim=2)
    factor = torch.where(largest < 1e-30, torch.zeros_like(largest), 127 / largest)
    integers = (groups * factor[:, :, None]).round()
    return integers, torch.where(largest < 1e-30, torch.zeros_like(largest), largest / 127)


def quantized_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Rounded to float32 once, at the end."""
    integers, scales = (part.double() for part in quantize_activations(x))
    weights, weight_scales, minima = unpack(weight)
    matrix = weights * weight_scales[:, :, None] + minima[:, :, None]
    return ((integers * scales[:, :, None]).flatten(1) @ matrix.flatten(1).T).float()
