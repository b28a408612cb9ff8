"""quantized_linear in plain torch: the same integers, summed over the groups in float64."""

import torch

from paceline_kernels.quantized_linear.packing import PackedWeight, WeightFormat

_GROUP, _TILE = 32, 16


def unpack(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers [outputs, groups, 32], scales and minima [outputs, groups], all float64, read from the layout."""
    num_groups, is_int8 = weight.num_inputs // _GROUP, weight.format is WeightFormat.INT8
    group_bytes, column_bytes = _GROUP * _TILE // (1 if is_int8 else 2), _TILE * (2 if is_int8 else 4)
    at, group_parts, column_parts = 0, [], []
    for group in range(num_groups):
        if group % weight.span == 0:
            here = weight.data[:, at : at + column_bytes].contiguous().view(torch.float16).double()
            at += column_bytes
        column_parts.append(here)
        group_parts.append(weight.data[:, at : at + group_bytes])
        at += group_bytes
    columns, groups = torch.stack(column_parts, dim=1), torch.stack(group_parts, dim=1)  # [tiles, groups, …]
    if is_int8:
        integers = groups.contiguous().view(torch.int8).reshape(*groups.shape[:2], 8, 2, 8, 4)
        minima = torch.zeros_like(columns)
    else:
        quads = groups.reshape(*groups.shape[:2], 8, 8, 4)
        integers = torch.stack((quads & 15, quads >> 4), dim=3)  # [tiles, groups, quads, halves, 8, 4]
        minima = columns[:, :, _TILE:]
        if weight.format is WeightFormat.INT4_ZEROS:
            minima = -minima * columns[:, :, :_TILE]
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
