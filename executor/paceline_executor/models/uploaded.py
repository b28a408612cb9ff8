"""Weights of a model on a device, as they arrive there.

Apart from `layers`, which knows no upload. Knows which tensors stay dense: those that rows are taken of, routers,
norms and biases.
"""

from dataclasses import dataclass

import torch

from paceline_executor.models.layers import DenseLinear, ExpertWeights, Linear, ScaledLinear, linears_of, of_experts
from paceline_executor.numerics import MatrixKind
from paceline_executor.upload.matrices import Uploader
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_kernels.scaled_linear import ScaledWeight


@dataclass(frozen=True, slots=True)
class UploadedWeights:
    """See `models.layers.Weights`."""

    uploader: Uploader
    kind: MatrixKind  # matrices that products are made with; a tied embedding is dense

    @property
    def config(self) -> ModelConfig:
        return self.uploader.config

    def dense(self, name: str) -> torch.Tensor:
        return self.uploader.dense(name)

    def vector(self, name: str) -> torch.Tensor:
        return self.uploader.dense(name, dtype=torch.float32)

    def norm(self, name: str) -> torch.Tensor:
        """Rounded once, when the 1 is added."""
        if not self.config.unit_offset_norms:
            return self.uploader.dense(name)
        return (self.uploader.dense(name, dtype=torch.float32) + 1.0).to(self.uploader.dtype)

    def bias(self, names: tuple[str, ...]) -> torch.Tensor:
        return self.uploader.dense(*names)

    def linear(self, names: tuple[str, ...], bias: torch.Tensor | None = None) -> Linear:
        weight = self.uploader.matrix(*names, kind=self.kind)
        if isinstance(weight, list):
            return linears_of(weight, bias)
        return ScaledLinear(weight, bias) if isinstance(weight, ScaledWeight) else DenseLinear(weight, bias)

    def experts(self, layer: int) -> tuple[ExpertWeights, ExpertWeights]:
        count = len(self.config.expert_names(layer, "down_proj"))
        gate_up, down = (of_experts(weight, count) for weight in self.uploader.experts(layer, self.kind))
        return gate_up, down
