"""Linear layers with weights of some kind, what weights are read from, and how a layer's are named.

Knows the names of a layer's tensors. It refuses to know what the layers are put together to, and how weights come to a
device: `HostWeights` are those of the CPU, `uploaded` has those of other devices.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from paceline_executor.weights.checkpoint import Checkpoint, ModelConfig
from paceline_kernels.linear import Splits, linear
from paceline_kernels.quantized_linear import PackedWeight, quantized_linear
from paceline_kernels.scaled_linear import ScaledWeight, scaled_linear


class Linear(Protocol):
    """A matrix product with weights of some kind."""

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        """x: [num_tokens, in] of the type that is computed with. Returns [num_tokens, out] of that type.

        Batch-invariant on a CPU, and on a GPU with Splits.FIXED.
        """
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A linear layer with weights [out, in] of the type that is computed with, and a bias [out] or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        """See `Linear`."""
        return linear(x, self.weight, self.bias, splits=splits)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer of a CPU with weights of 4 or 8 bits and inputs made int8, without a bias."""

    weight: PackedWeight

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:  # noqa: ARG002 (of GPUs)
        """See `Linear`."""
        return quantized_linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """A linear layer with weights of 8 bits and a scale per output, for GPUs, and a bias [out] or none."""

    weight: ScaledWeight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        """See `Linear`."""
        return scaled_linear(x, self.weight, self.bias, splits=splits)


class Weights(Protocol):
    """A checkpoint's weights on the device that computes with them."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    def embedding(self, name: str) -> torch.Tensor:
        """The matrix of this Hugging Face name, of the type that is computed with."""
        ...

    def norm(self, name: str) -> torch.Tensor:
        """What the norm of this name multiplies with, of that type."""
        ...

    def bias(self, names: tuple[str, ...]) -> torch.Tensor:
        """The biases of these names side by side, of that type."""
        ...

    def linear(self, names: tuple[str, ...], bias: torch.Tensor | None = None) -> Linear:
        """One layer for the matrices of these names, which take the same input, their outputs side by side."""
        ...


@dataclass(frozen=True, slots=True)
class HostWeights:
    """See `Weights`: float32 on the CPU."""

    checkpoint: Checkpoint

    @property
    def config(self) -> ModelConfig:
        """See `Weights`."""
        return self.checkpoint.config

    def embedding(self, name: str) -> torch.Tensor:
        """See `Weights`."""
        return torch.from_numpy(self.checkpoint.tensor(name))

    def norm(self, name: str) -> torch.Tensor:
        """See `Weights`."""
        weight = torch.from_numpy(self.checkpoint.tensor(name))
        return weight + 1.0 if self.config.unit_offset_norms else weight

    def bias(self, names: tuple[str, ...]) -> torch.Tensor:
        """See `Weights`."""
        return torch.from_numpy(np.concatenate([self.checkpoint.tensor(name) for name in names]))

    def linear(self, names: tuple[str, ...], bias: torch.Tensor | None = None) -> Linear:
        """See `Weights`."""
        matrices = [self.checkpoint.tensor(name) for name in names]
        stacked = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
        return DenseLinear(torch.from_numpy(stacked), bias)


# The matrices of a layer that take the same input.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)


@dataclass(frozen=True, slots=True)
class LayerReader:
    """Reads the tensors of one layer by their names inside the layer, such as "self_attn.q_proj"."""

    weights: Weights
    layer: int

    def names(self, *parts: str) -> tuple[str, ...]:
        """The Hugging Face names of these parts' weights."""
        return tuple(self._name(part, "weight") for part in parts)

    def norm(self, part: str) -> torch.Tensor:
        """What this norm multiplies with."""
        return self.weights.norm(self._name(part, "weight"))

    def feed_forward_norm(self) -> torch.Tensor:
        """The norm before the feed-forward network; Llama gives it the name that Gemma has for another one."""
        post_norms = self.weights.config.post_norms
        return self.norm("pre_feedforward_layernorm" if post_norms else "post_attention_layernorm")

    def bias(self, *parts: str) -> torch.Tensor | None:
        """The biases of matrices that take the same input, side by side; None where the model has none."""
        if not set(parts) <= set(self.weights.config.biased_matrices()):
            return None
        return self.weights.bias(tuple(self._name(part, "bias") for part in parts))

    def linear(self, *parts: str) -> Linear:
        """One layer for matrices that take the same input, their outputs side by side."""
        return self.weights.linear(self.names(*parts), self.bias(*parts))

    def _name(self, part: str, kind: str) -> str:
        return f"model.layers.{self.layer}.{part}.{kind}"
