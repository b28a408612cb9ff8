"""activation in plain torch, in float64."""

import torch
import torch.nn.functional as F  # noqa: N812, the name that everyone knows

from paceline_kernels.activation import Gate


def gate(gates: torch.Tensor, kind: Gate) -> torch.Tensor:
    """What the gates let through, in the type they have."""
    return F.silu(gates) if kind is Gate.SILU else F.gelu(gates, approximate="tanh")


def gate_and_multiply(gate_up: torch.Tensor, kind: Gate) -> torch.Tensor:
    """Rounded to float32 once, at the end."""
    gates, up = gate_up.double().chunk(2, dim=-1)
    return (gate(gates, kind) * up).float()


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """What `paceline_kernels.activation.softcap` leaves in x."""
    return (cap * torch.tanh(x.double() / cap)).float()
