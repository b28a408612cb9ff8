"""In which numbers a model is computed, on a CPU, on a GPU or its twin: what the options come to, and what that costs.

Refuses to know kernels, torch and how weights come to a device.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline_executor.errors import DrafterError, LimitError, UnsupportedModelError
from paceline_executor.weights import ModelConfig
from paceline_executor.weights.stored_tensor import (
    FloatType,
    GroupedType,
    StoredType,
    are_w8a8,
    grouped_type,
    has_linear_4_bits,
)

_GROUP = 32
_SCALE_BYTES = 4
_INT4_BYTES = 0.5 + 4 / _GROUP  # half a byte, and its part of a scale and a minimum for every 32
# The CPU's kernels of int8 keys and values take whole vectors of slots, and sum a head's products in 32 bits.
_INT8_SLOTS = 16
_INT8_MAX_HEAD_DIM = 512
_FIRST_WITH_FP8 = (8, 9)
_TILE_OUTPUTS = 16  # of weights in groups, on a GPU
EXPERTS = ".mlp.experts."  # in names of matrices
_OTHER_DRAFTER = "name a smaller model, with drafter draft_model"
_GPU_MAX_HEAD_DIM, _GPU_HEAD_DIM_STEP = 256, 8
_BEYOND_FLOAT16 = frozenset(("gemma2", "gemma3"))  # what flows between their layers exceeds 65,504


class Quantization(enum.Enum):
    AUTO = "auto"
    NONE = "none"
    FP8 = "fp8"  # for GPUs


class MatrixKind(enum.Enum):
    """What the matrices are that a step multiplies with."""

    DENSE = "dense"  # floats of the type that is computed with
    PACKED = "packed"  # 4 or 8 bits each, as stored; multiplied with int8 activations
    AS_STORED = "as stored"  # float8_e4m3fn, int8 and groups of 4 or 8 bits stay so, all others become dense
    FLOAT8 = "float8"  # float8_e4m3fn; others are rounded, with a scale for each row


class KvDtype(enum.Enum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"  # one scale for each slot of each KV head
    BFLOAT16 = "bfloat16"  # for GPUs, as is the next one
    FP8_E4M3 = "fp8_e4m3"  # one scale for each KV head of a layer

    def slot_bytes(self, head_dim: int) -> int:
        """Counts one key or value of one KV head."""
        if self is KvDtype.INT8:
            return head_dim + _SCALE_BYTES
        return head_dim * _ITEM_BYTES[self]


_ITEM_BYTES = {KvDtype.FLOAT32: 4, KvDtype.FLOAT16: 2, KvDtype.BFLOAT16: 2, KvDtype.FP8_E4M3: 1}


@dataclass(frozen=True, slots=True)
class Numerics:
    """float32 throughout is the measure of the others."""

    matrices: MatrixKind
    kv: KvDtype
    dtype: FloatType = FloatType.FLOAT32  # of activations, embeddings, norms and dense matrices

    @property
    def weights(self) -> str:
        """What logs say of the matrices: dense ones by their type."""
        return self.dtype.value if self.matrices is MatrixKind.DENSE else self.matrices.value

    @property
    def dense_kv(self) -> KvDtype:
        """The type that is computed with."""
        return KvDtype(self.dtype.value)

    def bytes_per_token(self, model: ModelConfig) -> int:
        """Counts the KV cache."""
        return 2 * model.num_layers * model.num_kv_heads * self.kv.slot_bytes(model.head_dim)

    def weight_bytes(self, model: ModelConfig, stored: Mapping[str, StoredType]) -> int:
        """Of packed ones, about the most it may be: where matrices of 4 bits have no such form, they take 8.

        stored: as in `choose_gpu_numerics`.
        """
        kept = self._as_computed(model, stored)
        return sum(self._tensor_bytes(name, shape, kept.get(name)) for name, shape in model.tensor_shapes().items())

    def max_bytes_per_weight(self) -> float:
        """Packed: a byte and its part of a scale for every 32."""
        return 1 + 2 / _GROUP if self.matrices is MatrixKind.PACKED else self.dtype.itemsize

    def _tensor_bytes(self, name: str, shape: tuple[int, ...], stored: StoredType | None) -> int:
        if self.matrices is MatrixKind.PACKED and len(shape) > 1:
            is_small = stored is not None and has_linear_4_bits(stored)
            return math.ceil(math.prod(shape) * (_INT4_BYTES if is_small else self.max_bytes_per_weight()))
        grouped = self._stays_grouped(name, stored)
        if grouped is not None:
            return _grouped_bytes(grouped, shape, self.dtype)
        stays_float8 = self.matrices is MatrixKind.AS_STORED and stored is FloatType.FLOAT8_E4M3FN
        if _is_multiplied(name) and (stays_float8 or self.matrices is MatrixKind.FLOAT8):
            return math.prod(shape) + _SCALE_BYTES * shape[0]
        return math.prod(shape) * self.dtype.itemsize

    def _as_computed(self, model: ModelConfig, stored: Mapping[str, StoredType]) -> Mapping[str, StoredType]:
        """Without the types of experts that become dense."""
        if self.matrices is not MatrixKind.AS_STORED or model.experts is None or not stored:
            return stored
        dense = {
            f"model.layers.{layer}"
            for layer in range(model.num_layers)
            if model.is_sparse(layer) and not experts_stay_grouped(model, layer, stored)
        }
        return {
            name: kind
            for name, kind in stored.items()
            if EXPERTS not in name or name.split(EXPERTS)[0] not in dense or not grouped_type(kind) or are_w8a8([kind])
        }

    def _stays_grouped(self, name: str, stored: StoredType | None) -> GroupedType | None:
        return grouped_type(stored) if self.matrices is MatrixKind.AS_STORED and _is_multiplied(name) else None

    def widened_bytes(self, model: ModelConfig, stored: Mapping[str, StoredType]) -> int:
        """What a step of many tokens takes for weights of 4 or 8 bits: one product's, such as gates', in 16 bits.

        W8A8 is widened only beside matrices that are not of it, experts never.
        """
        shapes = [each for each in model.tensor_shapes().items() if EXPERTS not in each[0]]
        grouped = {name: shape for name, shape in shapes if self._stays_grouped(name, stored.get(name))}
        if are_w8a8(map(stored.get, grouped)):
            return 0
        sizes = [math.prod(shape) * (1 if name.startswith("lm_head") else 2) for name, shape in grouped.items()]
        return max(sizes, default=0) * self.dtype.itemsize

    def rounded(self, stored: Mapping[str, StoredType], capability: tuple[int, int]) -> "Numerics":
        """Of a float8 copy. Raises DrafterError where that is no smaller, or not multiplied with."""
        stays_small = self.matrices is MatrixKind.AS_STORED and any(
            kind is FloatType.FLOAT8_E4M3FN or self._stays_grouped(name, kind) for name, kind in stored.items()
        )
        if stays_small or self.matrices is MatrixKind.FLOAT8:
            raise DrafterError(
                f"--speculation target_copy: the model's own matrices are of 4 or 8 bits already: {_OTHER_DRAFTER}"
            )
        if capability < _FIRST_WITH_FP8:
            raise DrafterError(f"--speculation target_copy {_needs_fp8(capability)}: {_OTHER_DRAFTER}")
        return replace(self, matrices=MatrixKind.FLOAT8, kv=self.dense_kv)


FLOAT32_NUMERICS = Numerics(MatrixKind.DENSE, KvDtype.FLOAT32)
"""Also the twin's."""


def experts_stay_grouped(model: ModelConfig, layer: int, stored: Mapping[str, StoredType]) -> bool:
    """Whether a GPU's kernels take the experts of a sparse layer in the groups that a file has: if both products do.

    stored: as in `choose_gpu_numerics`; all experts of a layer are stored alike.
    """
    assert model.experts is not None
    names = model.expert_names(layer, "gate_proj", "up_proj", "down_proj")[:3]
    gate, up, down = (grouped_type(stored.get(name)) for name in names)
    if gate is None or down is None or gate != up:
        return False
    hidden, intermediate = model.hidden_size, model.experts.intermediate_size
    return all(
        not kind.is_ordered and not kind.is_w8a8 and outputs % _TILE_OUTPUTS == 0 and _lies_in_tiles(kind, inputs)
        for kind, outputs, inputs in ((gate, intermediate, hidden), (down, hidden, intermediate))
    )


def _is_multiplied(name: str) -> bool:
    """Rows are taken of an embedding, which is dense, whatever its type in the file."""
    return name.endswith(("_proj.weight", "lm_head.weight"))


def _grouped_bytes(stored: GroupedType, shape: tuple[int, ...], dtype: FloatType) -> int:
    """Of whole tiles of 16 outputs and 128 inputs; of groups that do not lie in tiles, nor these in them, dense."""
    if stored.is_w8a8:
        return math.prod(shape) + _SCALE_BYTES * shape[0]
    if not _lies_in_tiles(stored, shape[1]):
        return math.prod(shape) * dtype.itemsize
    outputs, inputs = -(-shape[0] // _TILE_OUTPUTS) * _TILE_OUTPUTS, -(-shape[1] // 128) * 128
    group = stored.group or shape[1]
    of_group = stored.scales.itemsize * (1 + stored.has_minima) + stored.has_zeros
    return outputs * (inputs * stored.bits // 8 + -(-shape[1] // group) * of_group)


def _lies_in_tiles(stored: GroupedType, num_inputs: int) -> bool:
    group, tile = stored.group or num_inputs, 512 // stored.bits
    return group >= num_inputs or (group % 16 == 0 and (group % tile == 0 or tile % group == 0))


def choose_cpu_numerics(
    quantization: Quantization, kv_dtype: KvDtype | None, model: ModelConfig, block_size: int
) -> Numerics:
    """None leaves the choice of `kv_dtype` to us.

    Raises LimitError for numbers of GPUs, for keys and values in float32 beside packed weights, or in less beside
    float32 weights, and for int8 where blocks or heads do not allow it.
    """
    if quantization is Quantization.FP8:
        raise LimitError("--quantization fp8 is for GPUs: choose auto or none for a CPU, or another --runner")
    if kv_dtype in (KvDtype.BFLOAT16, KvDtype.FP8_E4M3):
        sentence = f"--kv-cache-dtype {kv_dtype.value} is for GPUs"
        raise LimitError(f"{sentence}: choose auto, float32, float16 or int8 for a CPU, or another --runner")
    experts = model.experts
    of_experts = () if experts is None else (experts.intermediate_size, experts.shared_intermediate_size)
    sizes = (model.hidden_size, model.intermediate_size, model.head_dim, *of_experts)
    if quantization is Quantization.NONE or any(size % _GROUP for size in sizes):
        if kv_dtype not in (None, KvDtype.FLOAT32):
            reason = "--quantization none" if quantization is Quantization.NONE else f"a model of sizes {sizes}"
            raise LimitError(f"{reason} computes in float32 throughout: leave --kv-cache-dtype {kv_dtype.value} out")
        return FLOAT32_NUMERICS
    if kv_dtype is KvDtype.FLOAT32:
        raise LimitError(
            "--kv-cache-dtype float32 needs --quantization none; choose float16 or int8 for packed weights"
        )
    takes_int8 = block_size % _INT8_SLOTS == 0 and model.head_dim <= _INT8_MAX_HEAD_DIM
    if kv_dtype is KvDtype.INT8 and not takes_int8:
        needs = f"a --block-size that {_INT8_SLOTS} divides and heads of at most {_INT8_MAX_HEAD_DIM} dimensions"
        raise LimitError(f"--kv-cache-dtype int8 needs {needs}, not {block_size} and {model.head_dim}")
    return Numerics(MatrixKind.PACKED, kv_dtype or (KvDtype.INT8 if takes_int8 else KvDtype.FLOAT16))


def choose_gpu_numerics(
    quantization: Quantization,
    kv_dtype: KvDtype | None,
    model: ModelConfig,
    stored: Mapping[str, StoredType],
    capability: tuple[int, int],
) -> Numerics:
    """None leaves the choice of `kv_dtype` to us.

    stored: how the file stores tensors, by Hugging Face name; empty for random weights. Raises LimitError for what this
    GPU or this model does not take, UnsupportedModelError for heads that its kernels do not.
    """
    if model.head_dim % _GPU_HEAD_DIM_STEP or model.head_dim > _GPU_MAX_HEAD_DIM:
        heads = f"heads of {model.head_dim} dimensions, and GPUs take multiples of {_GPU_HEAD_DIM_STEP}"
        raise UnsupportedModelError(f"the model has {heads} up to {_GPU_MAX_HEAD_DIM}: choose --runner cpu")
    has_fp8 = capability >= _FIRST_WITH_FP8
    if quantization is Quantization.FP8 and not has_fp8:
        raise LimitError(f"--quantization fp8 {_needs_fp8(capability)}: choose auto or none")
    dtype = _dtype_of(model, stored)
    return Numerics(_gpu_matrices(quantization, stored, has_fp8=has_fp8), _gpu_kv(kv_dtype, dtype, capability), dtype)


def choose_twin_numerics(quantization: Quantization, kv_dtype: KvDtype | None) -> Numerics:
    """The twin computes in float32. Raises LimitError for anything smaller."""
    if quantization is Quantization.FP8:
        raise LimitError("--quantization fp8 needs a GPU: choose auto or none for --runner twin")
    if kv_dtype not in (None, KvDtype.FLOAT32):
        raise LimitError(f"--kv-cache-dtype {kv_dtype.value} needs a GPU: choose auto or float32 for --runner twin")
    return FLOAT32_NUMERICS


def _gpu_matrices(quantization: Quantization, stored: Mapping[str, StoredType], *, has_fp8: bool) -> MatrixKind:
    if quantization is Quantization.FP8:
        return MatrixKind.FLOAT8
    is_possible = has_fp8 or FloatType.FLOAT8_E4M3FN not in stored.values()
    return MatrixKind.AS_STORED if quantization is Quantization.AUTO and is_possible else MatrixKind.DENSE


def _dtype_of(model: ModelConfig, stored: Mapping[str, StoredType]) -> FloatType:
    is_bfloat16 = not stored or FloatType.BFLOAT16 in stored.values()
    return FloatType.BFLOAT16 if is_bfloat16 or model.architecture in _BEYOND_FLOAT16 else FloatType.FLOAT16


def _gpu_kv(asked: KvDtype | None, dtype: FloatType, capability: tuple[int, int]) -> KvDtype:
    own = KvDtype(dtype.value)
    if asked is KvDtype.FP8_E4M3 and capability < _FIRST_WITH_FP8:
        raise LimitError(f"--kv-cache-dtype fp8_e4m3 {_needs_fp8(capability)}: choose int8 or {own.value}")
    if asked in (None, own, KvDtype.FP8_E4M3, KvDtype.INT8):
        return asked or own
    sentence = f"--kv-cache-dtype {asked.value} does not go with a model that this GPU computes in {own.value}"
    raise LimitError(f"{sentence}: choose auto, {own.value}, fp8_e4m3 or int8")


def _needs_fp8(capability: tuple[int, int]) -> str:
    return f"needs compute capability 8.9, and this GPU has {capability[0]}.{capability[1]}"
