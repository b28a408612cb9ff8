"""activation in plain torch, in float64."""

import torch


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """See `paceline_kernels.activation.silu_and_multiply`; rounded to float32 once, at the end."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).float()
