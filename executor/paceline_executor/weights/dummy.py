"""A checkpoint of random weights, of the shape that a config.json says: for benchmarks.

Apart from the readers: nothing is read.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from paceline_executor.weights.checkpoint import Float32Array, ModelConfig
from paceline_executor.weights.grouped_rows import GroupedRows
from paceline_executor.weights.hf.config import read_hf_config
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.quantised.formats import read_type
from paceline_executor.weights.hf.safetensors_folder import CONFIG_FILE
from paceline_executor.weights.stored_tensor import FloatType, GroupedType, MemoryBytes, StoredTensor, StoredType


def dummy_checkpoint(folder: Path) -> "DummyCheckpoint":
    """Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError."""
    config = read_hf_config(folder / CONFIG_FILE)
    return DummyCheckpoint(config, dummy_types(config, JsonFields.read(folder / CONFIG_FILE)))


def dummy_types(config: ModelConfig, fields: JsonFields) -> Mapping[str, StoredType]:
    """As of a checkpoint: of all tensors, where matrices are quantised, and else of none.

    fields: of config.json. Raises ModelCorruptError or UnsupportedModelError.
    """
    of_matrices = read_type(fields)
    if of_matrices is None:
        return {}
    matrices = [name for name in config.tensor_shapes() if name.endswith("_proj.weight")]
    return {**dict.fromkeys(config.tensor_shapes(), FloatType.BFLOAT16), **dict.fromkeys(matrices, of_matrices)}


class DummyCheckpoint:
    """The same for the same shape, whatever is read first."""

    def __init__(self, config: ModelConfig, stored_types: Mapping[str, StoredType] = MappingProxyType({})) -> None:
        """stored_types: see `dummy_types`."""
        self._config = config
        self._stored_types = stored_types
        self._places = {name: place for place, name in enumerate(config.tensor_shapes())}

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def quantization(self) -> str:
        return next((kind.name for kind in self._stored_types.values() if isinstance(kind, GroupedType)), "")

    @property
    def stored_types(self) -> Mapping[str, StoredType]:
        return self._stored_types

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
        if (rows := self.quantized(name)) is not None:
            return rows.floats()
        shape, place = self._config.tensor_shapes()[name], self._places[name]
        if name.endswith("bias"):
            return np.zeros(shape, np.float32)
        if len(shape) == 1:
            return np.full(shape, 0.0 if self._config.unit_offset_norms else 1.0, np.float32)
        noise = np.random.default_rng(place).standard_normal(shape, np.float32)
        noise *= np.float32(shape[1] ** -0.5)
        return noise

    def quantized(self, name: str) -> GroupedRows | None:
        """Codes of unit gain, zeros in their middle."""
        (outputs, *rest), place = self._config.tensor_shapes()[name], self._places[name]
        stored = self._stored_types.get(name)
        if not isinstance(stored, GroupedType):
            return None
        inputs, num_codes = rest[0], 1 << stored.bits
        group = min(stored.group or inputs, inputs)
        codes = np.random.default_rng(place).integers(0, num_codes, (outputs, inputs), np.uint8)
        of_groups = outputs, -(-inputs // group)
        scale = np.float16(inputs**-0.5 / spread_of_codes(stored.bits))  # as most files have; a CPU keeps no more of it
        scales = np.full(of_groups, scale, np.float32)
        return GroupedRows(stored.bits, codes, scales, group, np.full(of_groups, num_codes / 2, np.float32))


def spread_of_codes(num_bits: int) -> float:
    """The standard deviation of whole numbers below 2 ** num_bits."""
    return math.sqrt(((1 << 2 * num_bits) - 1) / 12)
