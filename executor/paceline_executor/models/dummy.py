"""Random weights of a model's shape, made on the device that computes with them, without any file.

Apart from `weights.dummy`, whose numbers the host makes for a CPU: 16 GB of them would take it most of a minute.
"""

from dataclasses import dataclass

import torch

from paceline_executor.models.layers import DenseLinear, Linear, ScaledLinear
from paceline_executor.weights.checkpoint import ModelConfig
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
    seed: int = 0

    def embedding(self, name: str) -> torch.Tensor:
        return self._matrix((name,))

    def norm(self, name: str) -> torch.Tensor:
        """Ones, whatever a file would add to."""
        return torch.ones(self.config.tensor_shapes()[name], dtype=self.dtype, device=self.device)

    def bias(self, names: tuple[str, ...]) -> torch.Tensor:
        shapes = self.config.tensor_shapes()
        return torch.zeros(sum(shapes[name][0] for name in names), dtype=self.dtype, device=self.device)

    def linear(self, names: tuple[str, ...], bias: torch.Tensor | None = None) -> Linear:
        return ScaledLinear(self._scaled(names), bias) if self.is_float8 else DenseLinear(self._matrix(names), bias)

    def _matrix(self, names: tuple[str, ...]) -> torch.Tensor:
        num_rows, width = self._shape(names)
        out = torch.empty((num_rows, width), dtype=self.dtype, device=self.device)
        return out.normal_(0.0, width**-0.5, generator=self._generator(names))

    def _scaled(self, names: tuple[str, ...]) -> ScaledWeight:
        num_rows, width = self._shape(names)
        generator = self._generator(names)
        values = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=self.device)
        scales = torch.empty((num_rows,), dtype=torch.float32, device=self.device)
        rows_at_once = max(1, _NUMBERS_AT_ONCE // width)
        for first in range(0, num_rows, rows_at_once):
            rows = slice(first, min(first + rows_at_once, num_rows))
            floats = torch.empty((rows.stop - first, width), device=self.device)
            part = quantize_rows(floats.normal_(0.0, width**-0.5, generator=generator), torch.float8_e4m3fn)
            values[rows], scales[rows] = part.values, part.scales
        return ScaledWeight(values, scales)

    def _shape(self, names: tuple[str, ...]) -> tuple[int, int]:
        shapes = [self.config.tensor_shapes()[name] for name in names]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def _generator(self, names: tuple[str, ...]) -> torch.Generator:
        """Of its own for each matrix, by its place among the tensors."""
        tensors = list(self.config.tensor_shapes())
        return torch.Generator(self.device).manual_seed(self.seed * len(tensors) + tensors.index(names[0]))
