"""In which numbers a GPU computes a model, or the twin of one: what the options come to, and what they cost in memory.

Refuses to know kernels and how weights come to a device.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from paceline_executor.errors import DrafterError, LimitError, UnsupportedModelError
from paceline_executor.numerics import KvDtype, Quantization
from paceline_executor.upload.matrices import MatrixKind
from paceline_executor.weights import ModelConfig
from paceline_executor.weights.stored_tensor import FloatType, StoredType

_FIRST_WITH_FP8 = (8, 9)
_OTHER_DRAFTER = "name a smaller model, with drafter draft_model"
_MAX_HEAD_DIM, _HEAD_DIM_STEP = 256, 8
_SCALE_BYTES = 4
_BEYOND_FLOAT16 = frozenset(("gemma2", "gemma3"))  # what flows between their layers exceeds 65,504
_OWN_KV = {torch.bfloat16: KvDtype.BFLOAT16, torch.float16: KvDtype.FLOAT16, torch.float32: KvDtype.FLOAT32}


@dataclass(frozen=True, slots=True)
class DeviceNumerics:
    dtype: torch.dtype  # of activations, embeddings, norms and dense matrices
    matrices: MatrixKind
    kv: KvDtype

    @property
    def dense_kv(self) -> KvDtype:
        """The type that is computed with."""
        return _OWN_KV[self.dtype]

    def bytes_per_token(self, model: ModelConfig) -> int:
        """Counts the KV cache."""
        return 2 * model.num_layers * model.num_kv_heads * self.kv.slot_bytes(model.head_dim)

    def weight_bytes(self, model: ModelConfig, stored: Mapping[str, StoredType]) -> int:
        """stored: as in `choose_device_numerics`."""
        return sum(self._tensor_bytes(name, shape, stored.get(name)) for name, shape in model.tensor_shapes().items())

    def _tensor_bytes(self, name: str, shape: tuple[int, ...], stored: StoredType | None) -> int:
        stays_float8 = self.matrices is MatrixKind.AS_STORED and stored is FloatType.FLOAT8_E4M3FN
        is_multiplied = name.endswith(("_proj.weight", "lm_head.weight"))
        if is_multiplied and (stays_float8 or self.matrices is MatrixKind.FLOAT8):
            return math.prod(shape) + _SCALE_BYTES * shape[0]
        return math.prod(shape) * self.dtype.itemsize

    def rounded(self, stored: Mapping[str, StoredType], capability: tuple[int, int]) -> "DeviceNumerics":
        """Of a float8 copy. Raises DrafterError where that is no smaller, or not multiplied with."""
        is_float8 = FloatType.FLOAT8_E4M3FN in stored.values() and self.matrices is MatrixKind.AS_STORED
        if is_float8 or self.matrices is MatrixKind.FLOAT8:
            raise DrafterError(
                f"--speculation target_copy: the model's own matrices are float8 already: {_OTHER_DRAFTER}"
            )
        if capability < _FIRST_WITH_FP8:
            raise DrafterError(f"--speculation target_copy {_needs_fp8(capability)}: {_OTHER_DRAFTER}")
        return replace(self, matrices=MatrixKind.FLOAT8, kv=self.dense_kv)


TWIN_NUMERICS = DeviceNumerics(torch.float32, MatrixKind.DENSE, KvDtype.FLOAT32)


def choose_device_numerics(
    quantization: Quantization,
    kv_dtype: KvDtype | None,
    model: ModelConfig,
    stored: Mapping[str, StoredType],
    capability: tuple[int, int],
) -> DeviceNumerics:
    """None leaves the choice of `kv_dtype` to us.

    stored: how the file stores tensors, by Hugging Face name; empty for random weights. Raises LimitError for what this
    GPU or this model does not take, UnsupportedModelError for heads that its kernels do not.
    """
    if model.head_dim % _HEAD_DIM_STEP or model.head_dim > _MAX_HEAD_DIM:
        heads = f"heads of {model.head_dim} dimensions, and GPUs take multiples of {_HEAD_DIM_STEP}"
        raise UnsupportedModelError(f"the model has {heads} up to {_MAX_HEAD_DIM}: choose --runner cpu")
    has_fp8 = capability >= _FIRST_WITH_FP8
    if quantization is Quantization.FP8 and not has_fp8:
        raise LimitError(f"--quantization fp8 {_needs_fp8(capability)}: choose auto or none")
    dtype = _dtype_of(model, stored)
    return DeviceNumerics(dtype, _matrices(quantization, has_fp8), _kv_of(kv_dtype, dtype, capability))


def choose_twin_numerics(quantization: Quantization, kv_dtype: KvDtype | None) -> DeviceNumerics:
    """The twin computes in float32. Raises LimitError for anything smaller."""
    if quantization is Quantization.FP8:
        raise LimitError("--quantization fp8 needs a GPU: choose auto or none for --runner twin")
    if kv_dtype not in (None, KvDtype.FLOAT32):
        raise LimitError(f"--kv-cache-dtype {kv_dtype.value} needs a GPU: choose auto or float32 for --runner twin")
    return TWIN_NUMERICS


def _matrices(quantization: Quantization, has_fp8: bool) -> MatrixKind:
    if quantization is Quantization.FP8:
        return MatrixKind.FLOAT8
    return MatrixKind.AS_STORED if quantization is Quantization.AUTO and has_fp8 else MatrixKind.DENSE


def _dtype_of(model: ModelConfig, stored: Mapping[str, StoredType]) -> torch.dtype:
    is_bfloat16 = not stored or FloatType.BFLOAT16 in stored.values()
    return torch.bfloat16 if is_bfloat16 or model.architecture in _BEYOND_FLOAT16 else torch.float16


def _kv_of(asked: KvDtype | None, dtype: torch.dtype, capability: tuple[int, int]) -> KvDtype:
    own = _OWN_KV[dtype]
    if asked is KvDtype.FP8_E4M3 and capability < _FIRST_WITH_FP8:
        raise LimitError(f"--kv-cache-dtype fp8_e4m3 {_needs_fp8(capability)}: choose int8 or {own.value}")
    if asked in (None, own, KvDtype.FP8_E4M3, KvDtype.INT8):
        return asked or own
    sentence = f"--kv-cache-dtype {asked.value} does not go with a model that this GPU computes in {own.value}"
    raise LimitError(f"{sentence}: choose auto, {own.value}, fp8_e4m3 or int8")


def _needs_fp8(capability: tuple[int, int]) -> str:
    return f"needs compute capability 8.9, and this GPU has {capability[0]}.{capability[1]}"
