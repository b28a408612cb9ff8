"""The layers that weights of different kinds can fill: today float32 matrices, later quantised ones.

Knows how weights are read from a checkpoint. It refuses to know what the layers are put together to.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from paceline_executor.weights.checkpoint import Checkpoint
from paceline_kernels.linear import linear


class Linear(Protocol):
    """A matrix product with weights of some kind."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in] float32. Returns [num_tokens, out] float32, batch-invariant."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A linear layer with float32 weights [out, in]."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return linear(x, self.weight)


def read_tensor(checkpoint: Checkpoint, name: str, device: torch.device) -> torch.Tensor:
    """The checkpoint's tensor of this Hugging Face name, float32, on the device."""
    return torch.from_numpy(checkpoint.tensor(name)).to(device)


def read_linear(checkpoint: Checkpoint, names: tuple[str, ...], device: torch.device) -> Linear:
    """One layer for matrices that take the same input, their outputs side by side: one product instead of several."""
    matrices = [checkpoint.tensor(name) for name in names]
    stacked = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
    return DenseLinear(torch.from_numpy(stacked).to(device))
