"""In which numbers a CPU computes a model: how its weights are multiplied, and how keys and values are kept.

`device_numerics` has those of GPUs. Refuses to know kernels, torch and file formats.
"""

import enum
from dataclasses import dataclass

from paceline_executor.errors import LimitError
from paceline_executor.weights import ModelConfig

_GROUP = 32
_INT8_SCALE_BYTES = 4
# The kernels of int8 keys and values take whole vectors of slots, and sum a head's products in 32 bits.
_INT8_SLOTS = 16
_INT8_MAX_HEAD_DIM = 512


class Quantization(enum.Enum):
    AUTO = "auto"
    NONE = "none"
    FP8 = "fp8"  # for GPUs


class WeightKind(enum.Enum):
    PACKED = "packed"  # 4 or 8 bits each, as stored; multiplied with int8 activations
    FLOAT32 = "float32"


class KvDtype(enum.Enum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"  # one scale for each slot of each KV head
    BFLOAT16 = "bfloat16"  # for GPUs, as is the next one
    FP8_E4M3 = "fp8_e4m3"  # one scale for each KV head of a layer

    def slot_bytes(self, head_dim: int) -> int:
        """Counts one key or value of one KV head."""
        if self is KvDtype.INT8:
            return head_dim + _INT8_SCALE_BYTES
        return head_dim * _ITEM_BYTES[self]


_ITEM_BYTES = {KvDtype.FLOAT32: 4, KvDtype.FLOAT16: 2, KvDtype.BFLOAT16: 2, KvDtype.FP8_E4M3: 1}


@dataclass(frozen=True, slots=True)
class Numerics:
    """float32 throughout is the measure of the others."""

    weights: WeightKind
    kv: KvDtype

    def max_bytes_per_weight(self) -> float:
        """Packed: a byte and its part of a scale for every 32."""
        return 4.0 if self.weights is WeightKind.FLOAT32 else 1 + 2 / _GROUP

    def bytes_per_token(self, model: ModelConfig) -> int:
        return 2 * model.num_layers * model.num_kv_heads * self.kv.slot_bytes(model.head_dim)


FLOAT32_NUMERICS = Numerics(WeightKind.FLOAT32, KvDtype.FLOAT32)


def choose_numerics(
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
    sizes = (model.hidden_size, model.intermediate_size, model.head_dim)
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
    return Numerics(WeightKind.PACKED, kv_dtype or (KvDtype.INT8 if takes_int8 else KvDtype.FLOAT16))
