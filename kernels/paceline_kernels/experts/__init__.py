"""experts: the gated feed-forward networks of a mixture, of which each token goes through a few.

Knows logits of a router, and matrices of all experts side by side. Refuses to know who made the logits, and the expert
that all tokens share. Shazeer et al., 2017, https://arxiv.org/abs/1701.06538.
"""

from dataclasses import dataclass

import torch

from paceline_kernels.activation import Gate
from paceline_kernels.arguments import check_tensor, float_type
from paceline_kernels.devices import is_cpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.routing import Routing

__all__ = ["ExpertParts", "Routes", "gated_experts", "route"]


@dataclass(frozen=True, slots=True)
class Routes:
    """Where tokens go, in the order of their choice: the largest score first."""

    experts: torch.Tensor  # [num_tokens, top_k] int32, of one token no two alike
    weights: torch.Tensor  # [num_tokens, top_k] float32


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """How a token's sum is divided, so that ranks may share it with the same bits: by slices or by groups.

    Each part's sum is in the order of the choice; parts are added as `sum_of_slices` does.
    """

    slices: int = 1  # of the intermediate size of each expert, of equal length
    groups: int = 1  # of whole experts, as many in each
    first_expert: int = 0  # whose matrices come first; a choice of an expert without matrices adds nothing


WHOLE = ExpertParts()


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> Routes:
    """Choose experts.

    logits: [num_tokens, num_experts], contiguous; float32 on a CPU. bias: [num_experts] float32, with `has_bias`.
    Tokens with a NaN among their logits have NaN for weights. Batch-invariant: tokens do not influence each other.
    Raises KernelArgumentError, UnsupportedDeviceError.
    """
    check_tensor("route", "logits", logits, float_type("route", "logits", logits), (None, routing.num_experts))
    if (bias is not None) != routing.has_bias:
        raise KernelArgumentError("route", "a bias belongs to a routing that has one")
    if bias is not None:
        check_tensor("route", "bias", bias, torch.float32, (routing.num_experts,))
    if not is_cpu(logits.device):
        raise UnsupportedDeviceError("route", logits.device)
    from paceline_kernels.experts import cpu

    return cpu.route(logits, routing, bias)


def gated_experts(
    x: torch.Tensor,
    routes: Routes,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate: Gate,
    *,
    parts: ExpertParts = WHOLE,
) -> torch.Tensor:
    """The sum of what a token's experts make of it, each times its weight, added in float32 in the order of `parts`.

    x: [num_tokens, hidden]. gate_up: [num_experts, 2 * intermediate, hidden], the gates first. down: [num_experts,
    hidden, intermediate]. All contiguous and of one type: float32 on a CPU. Returns [num_tokens, hidden] of that type,
    new. Batch-invariant. Raises KernelArgumentError, UnsupportedDeviceError.
    """
    op = "gated_experts"
    dtype = float_type(op, "x", x)
    check_tensor(op, "gate_up", gate_up, dtype, (None, None, None))
    num_experts, both, hidden = gate_up.shape
    if both % 2:
        raise KernelArgumentError(op, f"gate_up must have as many gates as it gates, not {both} in all")
    check_tensor(op, "down", down, dtype, (num_experts, hidden, both // 2))
    if both // 2 % parts.slices or num_experts % parts.groups:
        sizes = f"{num_experts} experts of {both // 2} inputs"
        raise KernelArgumentError(op, f"{sizes} have no {parts.slices} slices and {parts.groups} groups of one size")
    check_tensor(op, "x", x, dtype, (None, hidden))
    check_tensor(op, "routes.experts", routes.experts, torch.int32, (x.shape[0], None))
    check_tensor(op, "routes.weights", routes.weights, torch.float32, tuple(routes.experts.shape))
    if not is_cpu(x.device):
        raise UnsupportedDeviceError(op, x.device)
    from paceline_kernels.experts import cpu

    return cpu.gated_experts(x, routes, gate_up, down, gate, parts)
