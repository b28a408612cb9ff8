"""Linear layers with float32 weights, and how a layer's tensors are read.

Knows how weights, norms and biases are read from a checkpoint. It refuses to know what the layers are put together to.
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
    """A linear layer with float32 weights [out, in], and a bias [out] or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return linear(x, self.weight, self.bias)


# The matrices of a layer that take the same input.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)


@dataclass(frozen=True, slots=True)
class LayerReader:
    """Reads the tensors of one layer by their names inside the layer, such as "self_attn.q_proj"."""

    checkpoint: Checkpoint
    layer: int
    device: torch.device

    def names(self, *parts: str) -> tuple[str, ...]:
        """The Hugging Face names of these parts' weights."""
        return tuple(self._name(part, "weight") for part in parts)

    def norm(self, part: str) -> torch.Tensor:
        """What this norm multiplies with, float32."""
        return read_norm(self.checkpoint, self._name(part, "weight"), self.device)

    def feed_forward_norm(self) -> torch.Tensor:
        """The norm before the feed-forward network; Llama gives it the name that Gemma has for another one."""
        post_norms = self.checkpoint.config.post_norms
        return self.norm("pre_feedforward_layernorm" if post_norms else "post_attention_layernorm")

    def bias(self, *parts: str) -> torch.Tensor | None:
        """The biases of matrices that take the same input, side by side; None where the model has none."""
        if not set(parts) <= set(self.checkpoint.config.biased_matrices()):
            return None
        biases = [self.checkpoint.tensor(self._name(part, "bias")) for part in parts]
        return torch.from_numpy(np.concatenate(biases)).to(self.device)

    def linear(self, *parts: str) -> Linear:
        """One layer for matrices that take the same input, their outputs side by side."""
        weight = read_matrix(self.checkpoint, self.names(*parts), self.device)
        return DenseLinear(weight, self.bias(*parts))

    def _name(self, part: str, kind: str) -> str:
        return f"model.layers.{self.layer}.{part}.{kind}"


def read_tensor(checkpoint: Checkpoint, name: str, device: torch.device) -> torch.Tensor:
    """The checkpoint's tensor of this Hugging Face name, float32, on the device."""
    return torch.from_numpy(checkpoint.tensor(name)).to(device)


def read_norm(checkpoint: Checkpoint, name: str, device: torch.device) -> torch.Tensor:
    """What the norm of this Hugging Face name multiplies with, float32, on the device."""
    weight = read_tensor(checkpoint, name, device)
    return weight + 1.0 if checkpoint.config.unit_offset_norms else weight


def read_matrix(checkpoint: Checkpoint, names: tuple[str, ...], device: torch.device) -> torch.Tensor:
    """The matrices of these Hugging Face names, one below the other: one product instead of several."""
    matrices = [checkpoint.tensor(name) for name in names]
    stacked = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
    return torch.from_numpy(stacked).to(device)
