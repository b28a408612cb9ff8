"""A checkpoint of random weights, of the shape that a config.json says: for benchmarks.

Apart from the readers: nothing is read.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from paceline_executor.weights.checkpoint import Float32Array, ModelConfig
from paceline_executor.weights.hf.config import read_hf_config
from paceline_executor.weights.hf.safetensors_folder import CONFIG_FILE
from paceline_executor.weights.stored_tensor import FloatType, MemoryBytes, StoredTensor, StoredType


def dummy_checkpoint(folder: Path) -> "DummyCheckpoint":
    """Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError."""
    return DummyCheckpoint(read_hf_config(folder / CONFIG_FILE))


class DummyCheckpoint:
    """The same for the same shape, whatever is read first."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._places = {name: place for place, name in enumerate(config.tensor_shapes())}

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def quantization(self) -> str:
        return ""

    @property
    def stored_types(self) -> Mapping[str, StoredType]:
        return {}

    @property
    def digest(self) -> str:
        return ""

    @property
    def kv_scales(self) -> None:
        return None

    def stored(self, name: str) -> StoredTensor:
        """Float32, made when it is asked for."""
        values = self.tensor(name)
        return StoredTensor(name, FloatType.FLOAT32, values.shape, MemoryBytes(values.tobytes()), 0)

    def tensor(self, name: str) -> Float32Array:
        """Matrices of unit gain, norms that multiply by 1, biases of 0."""
        shape, place = self._config.tensor_shapes()[name], self._places[name]
        if name.endswith(".bias"):
            return np.zeros(shape, np.float32)
        if len(shape) == 1:
            return np.full(shape, 0.0 if self._config.unit_offset_norms else 1.0, np.float32)
        noise = np.random.default_rng(place).standard_normal(shape, np.float32)
        noise *= np.float32(shape[1] ** -0.5)
        return noise

    def quantized(self, name: str) -> None:
        if name not in self._places:
            raise KeyError(name)
