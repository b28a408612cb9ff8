"""A model's weights without numbers, on torch's device `meta`: to find out what a model launches, before there is one.

Apart from `uploaded`, which reads files. Knows shapes and types; the rest of the model is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from paceline_executor.models.layers import DenseLinear, ExpertWeights, Linear, ScaledLinear, linears_of, of_experts
from paceline_executor.numerics import MatrixKind, experts_stay_grouped
from paceline_executor.upload.grouping import expected_weight
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_executor.weights.stored_tensor import FloatType, StoredType, are_w8a8, grouped_type
from paceline_kernels.grouped_linear import GroupedWeight
from paceline_kernels.scaled_linear import ScaledWeight

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class ShapeWeights:
    """See `models.layers.Weights`."""

    config: ModelConfig
    dtype: torch.dtype  # that is computed with
    kind: MatrixKind
    stored: Mapping[str, StoredType]  # how the file has them, by name; empty: all dense

    def dense(self, name: str) -> torch.Tensor:
        return self._tensor(*self.config.tensor_shapes()[name])

    def vector(self, name: str) -> torch.Tensor:
        return torch.empty(self.config.tensor_shapes()[name], device=META)

    def norm(self, name: str) -> torch.Tensor:
        return self._tensor(*self.config.tensor_shapes()[name])

    def bias(self, names: tuple[str, ...]) -> torch.Tensor:
        return self._tensor(sum(self.config.tensor_shapes()[name][0] for name in names))

    def linear(self, names: tuple[str, ...], bias: torch.Tensor | None = None) -> Linear:
        """See `upload.matrices.Uploader.matrix` for which ones become 8-bit numbers."""
        shapes = [self.config.tensor_shapes()[name] for name in names]
        shape = sum(shape[0] for shape in shapes), shapes[0][1]
        types = [self.stored.get(name) for name in names]
        is_int8 = self.kind is MatrixKind.AS_STORED and are_w8a8(types)
        if self.kind is MatrixKind.AS_STORED and not is_int8:
            if any(map(grouped_type, types)):
                return linears_of([self._matrix(*each) for each in zip(types, shapes, strict=True)], bias)
            if FloatType.FLOAT8_E4M3FN not in types:
                return DenseLinear(self._tensor(*shape), bias)
        if self.kind is MatrixKind.DENSE:
            return DenseLinear(self._tensor(*shape), bias)
        values = torch.empty(shape, dtype=torch.int8 if is_int8 else torch.float8_e4m3fn, device=META)
        return ScaledLinear(ScaledWeight(values, torch.empty(shape[0], device=META)), bias)

    def experts(self, layer: int) -> tuple[ExpertWeights, ExpertWeights]:
        stays_grouped = self.kind is MatrixKind.AS_STORED and experts_stay_grouped(self.config, layer, self.stored)
        gate_up = self._experts(self.config.expert_names(layer, "gate_proj", "up_proj"), stays_grouped=stays_grouped)
        down = self._experts(self.config.expert_names(layer, "down_proj"), stays_grouped=stays_grouped)
        count = len(self.config.expert_names(layer, "down_proj"))
        return of_experts(gate_up, count), of_experts(down, count)

    def _experts(self, names: list[str], *, stays_grouped: bool) -> ExpertWeights:
        """One below the other."""
        types, (num_outputs, num_inputs) = [self.stored.get(name) for name in names], self._shape(names[0])
        if stays_grouped:
            stacked = self._matrix(types[0], (len(names) * num_outputs, num_inputs))
            assert isinstance(stacked, GroupedWeight)
            return stacked
        widens = self.kind is MatrixKind.AS_STORED and any(map(grouped_type, types)) and not are_w8a8(types)
        linear = (replace(self, kind=MatrixKind.DENSE) if widens else self).linear(tuple(names))
        assert isinstance(linear, DenseLinear | ScaledLinear)
        return linear.weight

    def _shape(self, name: str) -> tuple[int, int]:
        num_outputs, num_inputs = self.config.tensor_shapes()[name]
        return num_outputs, num_inputs

    def _matrix(self, stored: StoredType | None, shape: tuple[int, ...]) -> torch.Tensor | GroupedWeight:
        grouped = grouped_type(stored)
        if grouped is not None:
            weight = expected_weight(grouped, (shape[0], shape[1]), self.dtype, META)
            if weight is not None:
                return weight
        return self._tensor(*shape)

    def _tensor(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=META)
