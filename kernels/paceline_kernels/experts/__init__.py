"""experts: the gated feed-forward networks of a mixture, of which each token goes through a few.

Knows logits of a router, and matrices of all experts side by side. Refuses to know who made the logits, and the expert
that all tokens share. Shazeer et al., 2017, https://arxiv.org/abs/1701.06538.
"""

from dataclasses import replace

import torch

from paceline_kernels import gpu
from paceline_kernels.activation.gates import Gate
from paceline_kernels.arguments import check_tensor, float_type
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.experts.routes import WHOLE, ExpertParts, Routes
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.grouped_linear.weights import GroupedWeight
from paceline_kernels.routing import Routing
from paceline_kernels.scaled_linear.weights import ScaledWeight

__all__ = ["ExpertParts", "Gate", "GroupedWeight", "Routes", "ScaledWeight", "Splits", "gated_experts", "route"]
_OP = "gated_experts"
_EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> Routes:
    """Choose experts.

    logits: [num_tokens, num_experts] float32, contiguous. bias: [num_experts] float32, with `has_bias`.
    Tokens with a NaN among their logits have NaN for weights. Batch-invariant: tokens do not influence each other.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("route", "logits", logits, torch.float32, (None, routing.num_experts))
    if (bias is not None) != routing.has_bias:
        raise KernelArgumentError("route", "a bias belongs to a routing that has one")
    if bias is not None:
        check_tensor("route", "bias", bias, torch.float32, (routing.num_experts,))
    if is_cpu(logits.device):
        from paceline_kernels.experts import cpu

        return cpu.route(logits, routing, bias)
    if not gpu.has_kernels(logits.device):
        raise UnsupportedDeviceError("route", logits.device, gpu.DEVICES)
    from paceline_kernels.experts import triton

    return triton.route(logits, routing, bias)


def gated_experts(
    x: torch.Tensor,
    routes: Routes,
    gate_up: torch.Tensor | ScaledWeight | GroupedWeight,
    down: torch.Tensor | ScaledWeight | GroupedWeight,
    gate: Gate,
    *,
    splits: Splits = Splits.EVEN,
    parts: ExpertParts = WHOLE,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The sum of what a token's experts make of it, each times its weight, added in float32 in the order of `parts`.

    x: [num_tokens, hidden]. gate_up: [num_experts, 2 * intermediate, hidden], the gates first. down: [num_experts,
    hidden, intermediate]. All contiguous and of one type: float32 on a CPU, bfloat16 or float16 on a GPU, where weights
    may be of 8 bits, too, float8_e4m3fn or int8, with float32 scales [num_experts, outputs], or both grouped, all
    experts' outputs one below the other, without an order of inputs. Returns [num_tokens, hidden] of x's type, or of
    dtype: float32, for sums that ranks add to theirs; new.

    On a GPU sums are float32; what passes the gates is rounded to x's type, as is what an expert makes of a token.

    Batch-invariant on a CPU, and on a GPU with Splits.FIXED; with Splits.EVEN the products are whichever are expected
    to be fastest for as many tokens. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    if not is_cpu(x.device) and not gpu.has_kernels(x.device):
        raise UnsupportedDeviceError(_OP, x.device, gpu.DEVICES)
    own = float_type(_OP, "x", x)
    if dtype not in (None, own, torch.float32):
        raise KernelArgumentError(_OP, f"the result must be of the type of x or torch.float32, not {dtype}")
    if isinstance(gate_up, GroupedWeight) and isinstance(down, GroupedWeight) and not is_cpu(x.device):
        hidden = gate_up.layout.num_inputs
        _check_groups(gate_up, down, own)
    else:
        num_experts, both, hidden = _check_weight("gate_up", gate_up, own, (None, None, None))
        if both % 2:
            raise KernelArgumentError(_OP, f"gate_up must have as many gates as it gates, not {both} in all")
        _check_weight("down", down, own, (num_experts, hidden, both // 2))
    check_tensor(_OP, "x", x, own, (None, hidden))
    check_tensor(_OP, "routes.experts", routes.experts, torch.int32, (x.shape[0], None))
    check_tensor(_OP, "routes.weights", routes.weights, torch.float32, tuple(routes.experts.shape))
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        if both // 2 % parts.slices or num_experts % parts.groups:
            sizes = f"{num_experts} experts of {both // 2} inputs"
            raise KernelArgumentError(_OP, f"{sizes} have no {parts.slices} slices and {parts.groups} equal groups")
        if is_cpu(x.device):
            from paceline_kernels.experts import cpu

            return cpu.gated_experts(x, routes, gate_up, down, gate, parts)
    if splits is Splits.EVEN or not (isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)):
        parts = replace(parts, slices=1, groups=1)
    from paceline_kernels.experts import triton

    return triton.gated_experts(x, routes, gate_up, down, gate, splits, parts, dtype)


def _check_weight(
    name: str,
    weight: torch.Tensor | ScaledWeight | GroupedWeight,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
) -> tuple[int, ...]:
    if isinstance(weight, torch.Tensor):
        check_tensor(_OP, name, weight, dtype, shape)
        return tuple(weight.shape)
    if isinstance(weight, GroupedWeight):
        raise KernelArgumentError(_OP, f"{name} may be grouped on a GPU, where both weights are")
    values, scales = weight.values, weight.scales
    if is_cpu(values.device) or values.dtype not in _EIGHT_BITS:
        problem = f"{name} must be {dtype}, or on a GPU torch.float8_e4m3fn or torch.int8, not {values.dtype}"
        raise KernelArgumentError(_OP, problem)
    check_tensor(_OP, name, values, values.dtype, shape)
    check_tensor(_OP, f"scales of {name}", scales, torch.float32, tuple(values.shape[:2]))
    return tuple(values.shape)


def _check_groups(gate_up: GroupedWeight, down: GroupedWeight, dtype: torch.dtype) -> None:
    up, out = gate_up.layout, down.layout
    num_experts = out.num_outputs // up.num_inputs
    if (out.num_outputs, up.num_outputs) != (num_experts * up.num_inputs, num_experts * 2 * out.num_inputs):
        shapes = f"[{up.num_outputs}, {up.num_inputs}] and [{out.num_outputs}, {out.num_inputs}]"
        raise KernelArgumentError(_OP, f"no number of experts has weights {shapes}")
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.order is not None:
            raise KernelArgumentError(_OP, f"{name} must have its inputs in the order of the model")
        if weight.table is not None:
            check_tensor(_OP, f"table of {name}", weight.table, dtype, (16,))
