"""Linear layers with weights of some kind, what weights are read from, and how a layer's are named.

Refuses to know what the layers are put together to, and how weights come to a device: `HostWeights` are those of the
CPU, `uploaded` has those of other devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from paceline_executor.models.rope import head_order
from paceline_executor.upload.grouping import joined, reordered
from paceline_executor.weights.checkpoint import Checkpoint, ModelConfig
from paceline_executor.weights.shares import own_slices
from paceline_kernels.activation import Gate, gate_and_multiply, gate_and_multiply_rounded
from paceline_kernels.grouped_linear import GroupedWeight, grouped_linear
from paceline_kernels.linear import Splits, linear, unrounded_linear
from paceline_kernels.quantized_linear import PackedWeight, quantized_linear
from paceline_kernels.rms_norm import rms_norm, rms_norm_rounded
from paceline_kernels.scaled_linear import RoundedRows, ScaledWeight, quantize_rows, rounded_type, scaled_linear

ExpertWeights = torch.Tensor | ScaledWeight | GroupedWeight


class Linear(Protocol):
    @property
    def num_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        """x: [num_tokens, in] of the type that is computed with. Returns [num_tokens, out] of that type.

        Batch-invariant on a CPU, and on a GPU with Splits.FIXED.
        """
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Weights [out, in] of the type that is computed with, a bias [out] or none. slices: as `linear` takes them."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    slices: int = 1

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        return linear(x, self.weight, self.bias, splits=splits, slices=self.slices)


@dataclass(frozen=True, slots=True)
class UnroundedLinear:
    """Weights [out, in] of the type that is computed with, outputs of float32: numbers on which choices depend."""

    weight: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        return unrounded_linear(x, self.weight, splits=splits)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer of a CPU with weights of 4 or 8 bits and inputs made int8, without a bias."""

    weight: PackedWeight

    @property
    def num_bytes(self) -> int:
        return self.weight.data.numel()

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:  # noqa: ARG002 (of GPUs)
        return quantized_linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """Weights of 8 bits and a scale per output, for GPUs, a bias [out] or none."""

    weight: ScaledWeight
    bias: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return bytes_of(self.weight)

    def __call__(self, x: torch.Tensor | RoundedRows, splits: Splits) -> torch.Tensor:
        return scaled_linear(x, self.weight, self.bias, splits=splits)

    def rounded_type(self, x: torch.Tensor, splits: Splits) -> torch.dtype | None:
        return rounded_type(x.shape[0], x.dtype, self.weight, splits)


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """Weights of 4 or 8 bits with scales of groups of inputs, for GPUs, a bias [out] or none."""

    weight: GroupedWeight
    bias: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        return grouped_linear(x, self.weight, self.bias, splits=splits)


@dataclass(frozen=True, slots=True)
class SeparateLinears:
    """Several side by side, whose weights are not of one kind or take their inputs in different orders."""

    parts: tuple[Linear, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        return torch.cat([part(x, splits) for part in self.parts], dim=1)


def linears_of(weights: Sequence[torch.Tensor | GroupedWeight], bias: torch.Tensor | None) -> Linear:
    """Grouped weights side by side, or dense ones among them: neighbours are one product where that is possible."""
    parts = list(weights[:1])
    for weight in weights[1:]:
        both = _together(parts[-1], weight)
        parts[-1:] = [parts[-1], weight] if both is None else [both]
    sizes = [each.layout.num_outputs if isinstance(each, GroupedWeight) else each.shape[0] for each in parts]
    biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
    linears: list[Linear] = [
        GroupedLinear(each, of_part) if isinstance(each, GroupedWeight) else DenseLinear(each, of_part)
        for each, of_part in zip(parts, biases, strict=True)
    ]
    return linears[0] if len(linears) == 1 else SeparateLinears(tuple(linears))


def _together(
    one: torch.Tensor | GroupedWeight, other: torch.Tensor | GroupedWeight
) -> torch.Tensor | GroupedWeight | None:
    if isinstance(one, GroupedWeight) and isinstance(other, GroupedWeight):
        return joined(one, other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.cat((one, other))
    return None


def _with_outputs(linear: Linear, rows: torch.Tensor) -> Linear:
    """In another order, in which each of several side by side keeps its own. rows: [out], which one comes where."""
    if isinstance(linear, SeparateLinears):
        parts, first = [], 0
        for part in linear.parts:
            assert isinstance(part, DenseLinear | GroupedLinear)
            weight = part.weight
            size = weight.layout.num_outputs if isinstance(weight, GroupedWeight) else weight.shape[0]
            parts.append(_with_outputs(part, rows[first : first + size] - first))
            first += size
        return SeparateLinears(tuple(parts))
    assert isinstance(linear, DenseLinear | ScaledLinear | GroupedLinear)
    bias = None if linear.bias is None else linear.bias[rows]
    if isinstance(linear, DenseLinear):
        return replace(linear, weight=linear.weight[rows], bias=bias)
    if isinstance(linear, GroupedLinear):
        return GroupedLinear(reordered(linear.weight, rows.to(linear.weight.words.device)), bias)
    values, scales = linear.weight.values, linear.weight.scales
    octets = values.view(torch.uint8)[rows]  # no device indexes float8
    return ScaledLinear(ScaledWeight(octets.view(values.dtype), scales[rows]), bias)


def normalised_linear(
    linear: Linear,
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    splits: Splits,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of what `rms_norm` returns. Where the product would round rows, the norm has rounded them."""
    if isinstance(linear, ScaledLinear) and (rounded_to := linear.rounded_type(x, splits)):
        return linear(rms_norm_rounded(x, norm, eps, rounded_to, residual=residual), splits)
    return linear(rms_norm(x, norm, eps, residual=residual), splits)


def gated_linear(linear: Linear, gate_up: torch.Tensor, gate: Gate, splits: Splits) -> torch.Tensor:
    """The same of what `gate_and_multiply` returns."""
    if isinstance(linear, ScaledLinear) and (rounded_to := linear.rounded_type(gate_up, splits)):
        return linear(gate_and_multiply_rounded(gate_up, gate, rounded_to), splits)
    return linear(gate_and_multiply(gate_up, gate), splits)


def of_experts(weight: ExpertWeights, count: int) -> ExpertWeights:
    """Of matrices of so many experts one below the other: [count, out, in], but for grouped ones."""
    if isinstance(weight, GroupedWeight):
        return weight
    if isinstance(weight, ScaledWeight):
        values = weight.values
        return ScaledWeight(values.view(count, -1, values.shape[1]), weight.scales.view(count, -1))
    return weight.view(count, -1, weight.shape[1])


def bytes_of(weight: ExpertWeights) -> int:
    if isinstance(weight, ScaledWeight):
        return weight.values.nbytes + weight.scales.nbytes
    return weight.num_bytes if isinstance(weight, GroupedWeight) else weight.nbytes


class Weights(Protocol):
    """On the device that computes with them."""

    @property
    def config(self) -> ModelConfig: ...

    def dense(self, name: str) -> torch.Tensor:
        """Takes a Hugging Face name; of the type that is computed with, whatever products are made with."""
        ...

    def vector(self, name: str) -> torch.Tensor:
        """float32."""
        ...

    def norm(self, name: str) -> torch.Tensor:
        """Returns what the norm multiplies with."""
        ...

    def bias(self, names: tuple[str, ...]) -> torch.Tensor:
        """They are side by side."""
        ...

    def linear(self, names: tuple[str, ...], bias: torch.Tensor | None = None) -> Linear:
        """The matrices take the same input; their outputs are side by side."""
        ...

    def experts(self, layer: int) -> tuple[ExpertWeights, ExpertWeights]:
        """Gates and ups, and downs, of a sparse layer, as `gated_experts` takes them."""
        ...


@dataclass(frozen=True, slots=True)
class HostWeights:
    """float32 on the CPU. is_rounded: to what float8 holds."""

    checkpoint: Checkpoint
    is_rounded: bool = False

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def dense(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.checkpoint.tensor(name))

    vector = dense

    def norm(self, name: str) -> torch.Tensor:
        weight = torch.from_numpy(self.checkpoint.tensor(name))
        return weight + 1.0 if self.config.unit_offset_norms else weight

    def bias(self, names: tuple[str, ...]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([self.checkpoint.tensor(name) for name in names]))

    def linear(self, names: tuple[str, ...], bias: torch.Tensor | None = None) -> Linear:
        matrices = [self.checkpoint.tensor(name) for name in names]
        stacked = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
        weight = torch.from_numpy(stacked)
        if self.is_rounded:
            rounded = quantize_rows(weight, torch.float8_e4m3fn)
            weight = rounded.values.float() * rounded.scales[:, None]
        return DenseLinear(weight, bias)

    def experts(self, layer: int) -> tuple[ExpertWeights, ExpertWeights]:
        return self._stacked(layer, "gate_proj", "up_proj"), self._stacked(layer, "down_proj")

    def _stacked(self, layer: int, *parts: str) -> torch.Tensor:
        """Matrix by matrix: of a layer's experts there is one copy."""
        names = self.config.expert_names(layer, *parts)
        num_outputs, num_inputs = self.config.tensor_shapes()[names[0]]
        stacked = torch.empty((len(names), num_outputs, num_inputs))
        for place, name in enumerate(names):
            matrix = self.linear((name,))
            assert isinstance(matrix, DenseLinear)
            stacked[place] = matrix.weight
        return stacked.view(-1, len(parts) * num_outputs, num_inputs)


# The matrices of a layer that take the same input.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)


@dataclass(frozen=True, slots=True)
class LayerReader:
    """By names inside the layer, such as "self_attn.q_proj"."""

    weights: Weights
    layer: int

    def names(self, *parts: str) -> tuple[str, ...]:
        """Returns Hugging Face's names."""
        return tuple(self._name(part, "weight") for part in parts)

    def norm(self, part: str) -> torch.Tensor:
        return self.weights.norm(self._name(part, "weight"))

    def feed_forward_norm(self) -> torch.Tensor:
        """Llama gives it the name that Gemma has for another one."""
        post_norms = self.weights.config.post_norms
        return self.norm("pre_feedforward_layernorm" if post_norms else "post_attention_layernorm")

    def bias(self, *parts: str) -> torch.Tensor | None:
        """None where the model has none."""
        if not set(parts) <= set(self.weights.config.biased_matrices()):
            return None
        return self.weights.bias(tuple(self._name(part, "bias") for part in parts))

    def vector(self, part: str) -> torch.Tensor:
        return self.weights.vector(f"model.layers.{self.layer}.{part}")

    def unrounded_linear(self, part: str) -> UnroundedLinear:
        return UnroundedLinear(self.weights.dense(self._name(part, "weight")))

    def linear(self, *parts: str) -> Linear:
        linear = self.weights.linear(self.names(*parts), self.bias(*parts))
        if parts[0].endswith((".o_proj", ".down_proj")) and isinstance(linear, DenseLinear):
            return replace(linear, slices=own_slices(self.weights.config))
        return linear

    def qkv(self) -> Linear:
        """Queries, keys and values, heads in the order of `head_order`."""
        linear, config = self.linear(*QKV), self.weights.config
        order = head_order(config)
        if order is None:
            return linear
        num_rotated = config.num_heads + config.num_kv_heads
        rows = torch.arange((num_rotated + config.num_kv_heads) * config.head_dim).view(-1, config.head_dim)
        rows[:num_rotated] = rows[:num_rotated, torch.from_numpy(order)]
        return _with_outputs(linear, rows.flatten())

    def head_norm(self, part: str) -> torch.Tensor:
        """Of queries or keys."""
        norm, order = self.norm(part), head_order(self.weights.config)
        return norm if order is None else norm[torch.from_numpy(order)]

    def _name(self, part: str, kind: str) -> str:
        return f"model.layers.{self.layer}.{part}.{kind}"
