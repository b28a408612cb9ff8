"""Random weights of a model's shape, made on the device that computes with them, without any file.

Apart from `weights.dummy`, whose numbers the host makes for a CPU: 16 GB of them would take it most of a minute.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline_executor.models.layers import DenseLinear, ExpertWeights, Linear, ScaledLinear, linears_of, of_experts
from paceline_executor.numerics import experts_stay_grouped
from paceline_executor.upload.grouping import expected_weight
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_executor.weights.dummy import spread_of_codes
from paceline_executor.weights.stored_tensor import GroupedType, StoredType, are_w8a8
from paceline_kernels.grouped_linear import GroupedWeight
from paceline_kernels.scaled_linear import ScaledWeight, quantize_rows

# So that float8 weights need no copy of theirs in float32.
_NUMBERS_AT_ONCE = 16 << 20


@dataclass(frozen=True, slots=True)
class DummyWeights:
    """The same for the same seed, shapes and kind of device, whatever is read first."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype  # computed with
    is_float8: bool  # matrices that products are made with; a tied embedding is dense
    stored: Mapping[str, StoredType]  # as of a checkpoint; empty: all dense or float8
    seed: int = 0

    def dense(self, name: str) -> torch.Tensor:
        return self._matrix((name,))

    def vector(self, name: str) -> torch.Tensor:
        return torch.zeros(self.config.tensor_shapes()[name], device=self.device)

    def norm(self, name: str) -> torch.Tensor:
        """Ones, whatever a file would add to."""
        return torch.ones(self.config.tensor_shapes()[name], dtype=self.dtype, device=self.device)

    def bias(self, names: tuple[str, ...]) -> torch.Tensor:
        shapes = self.config.tensor_shapes()
        return torch.zeros(sum(shapes[name][0] for name in names), dtype=self.dtype, device=self.device)

    def linear(self, names: tuple[str, ...], bias: torch.Tensor | None = None) -> Linear:
        if self.is_float8:
            return ScaledLinear(self._scaled(names), bias)
        stored = [self.stored.get(name) for name in names]
        if any(isinstance(kind, GroupedType) for kind in stored):
            return linears_of(
                [self._as_stored((name,), of_it) for name, of_it in zip(names, stored, strict=True)], bias
            )
        return DenseLinear(self._matrix(names), bias)

    def experts(self, layer: int) -> tuple[ExpertWeights, ExpertWeights]:
        count = len(self.config.expert_names(layer, "down_proj"))
        gate_up, down = (
            of_experts(self._experts(layer, tuple(self.config.expert_names(layer, *parts))), count)
            for parts in (("gate_proj", "up_proj"), ("down_proj",))
        )
        return gate_up, down

    def _experts(self, layer: int, names: tuple[str, ...]) -> ExpertWeights:
        """One below the other."""
        stored = self.stored.get(names[0])
        if self.is_float8:
            return self._scaled(names)
        if stored is not None and are_w8a8([stored]):
            return self._scaled(names, torch.int8)
        if experts_stay_grouped(self.config, layer, self.stored):
            return self._as_stored(names, stored)
        return self._matrix(names)

    def _matrix(self, names: tuple[str, ...]) -> torch.Tensor:
        num_rows, width = self._shape(names)
        out = torch.empty((num_rows, width), dtype=self.dtype, device=self.device)
        return out.normal_(0.0, width**-0.5, generator=self._generator(names))

    def _as_stored(self, names: tuple[str, ...], stored: StoredType | None) -> torch.Tensor | GroupedWeight:
        """In groups where kernels have a form for such; zeros are the middle of the codes. Inputs are in any order, the
        same for all of as many: as in files, matrices that take the same inputs can be one.
        """
        shape = self._shape(names)
        weight = None
        if isinstance(stored, GroupedType) and stored.is_linear:
            weight = expected_weight(stored, shape, self.dtype, self.device)
        if weight is None:
            return self._matrix(names)
        generator, num_bits = self._generator(names), weight.layout.codes.num_bits
        weight.words.random_(-(1 << 31), 1 << 31, generator=generator)
        weight.scales.fill_(shape[1] ** -0.5 / spread_of_codes(num_bits))
        if weight.zeros is not None:
            weight.zeros.fill_(1 << num_bits - 1)
        if weight.order is not None:
            torch.randperm(shape[1], generator=torch.Generator(self.device).manual_seed(self.seed), out=weight.order)
        return weight

    def _scaled(self, names: tuple[str, ...], dtype: torch.dtype = torch.float8_e4m3fn) -> ScaledWeight:
        num_rows, width = self._shape(names)
        generator = self._generator(names)
        values = torch.empty((num_rows, width), dtype=dtype, device=self.device)
        scales = torch.empty((num_rows,), dtype=torch.float32, device=self.device)
        rows_at_once = max(1, _NUMBERS_AT_ONCE // width)
        for first in range(0, num_rows, rows_at_once):
            rows = slice(first, min(first + rows_at_once, num_rows))
            floats = torch.empty((rows.stop - first, width), device=self.device)
            part = quantize_rows(floats.normal_(0.0, width**-0.5, generator=generator), dtype)
            values[rows], scales[rows] = part.values, part.scales
        return ScaledWeight(values, scales)

    def _shape(self, names: tuple[str, ...]) -> tuple[int, int]:
        shapes = [self.config.tensor_shapes()[name] for name in names]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def _generator(self, names: tuple[str, ...]) -> torch.Generator:
        """Of its own for each matrix, by its place among the tensors."""
        tensors = list(self.config.tensor_shapes())
        return torch.Generator(self.device).manual_seed(self.seed * len(tensors) + tensors.index(names[0]))
