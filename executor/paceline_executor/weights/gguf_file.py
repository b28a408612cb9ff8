"""A Llama-architecture model out of a GGUF file: its configuration, and its tensors as float32.

Knows GGUF's keys and tensor names for the `llama` architecture, as docs/gguf.md of the ggml project lists them, and
what converting a Hugging Face model to GGUF did to the rows of the query and key projections. Dequantising is the gguf
library's. It does not know the file layout (`gguf_header` does), the tokenizer, or how the model computes.
"""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import dequantize
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline_executor.errors import ModelCorruptError
from paceline_executor.weights.checkpoint import Float32Array, ModelConfig
from paceline_executor.weights.gguf_header import GgufHeader, TensorInfo
from paceline_executor.weights.quantized_rows import Int4Rows, QuantizedRows, take_apart
from paceline_executor.weights.refusals import damaged, shown, unsupported

_FLOATING_POINT = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
MAX_CONTEXT_LENGTH = 1 << 24
MAX_DIMENSION = 1 << 24
# Rows are dequantised in groups by the library; longer rows than the model's make fewer, larger groups.
_TARGET_ROW_ELEMENTS = 8192

_TOP_LEVEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Keys that change what the model computes, with the values under which they change nothing.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scale_linear": (1,),
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}


def checkpoint_from_gguf(header: GgufHeader) -> "GgufCheckpoint":
    """Check what the header says of the weights, and return them ready to be read.

    Raises ModelCorruptError or UnsupportedModelError, before memory is taken for any weight.
    """
    _check_kind(header)
    config = _read_config(header)
    stored_names = {name: _stored_name(name) for name in config.tensor_shapes()}
    _check_tensors(header, config, stored_names)
    return GgufCheckpoint(header, config, stored_names)


class GgufCheckpoint:
    """Reads tensors from the file on demand; holds no weight and no open file between calls."""

    def __init__(self, header: GgufHeader, config: ModelConfig, stored_names: dict[str, str]) -> None:
        self._path = header.path
        self._infos = {name: header.tensors[stored] for name, stored in stored_names.items()}
        self._config = config

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    @property
    def quantization(self) -> str:
        """See `Checkpoint.quantization`."""
        sizes: Counter[GGMLQuantizationType] = Counter()
        for info in self._infos.values():
            sizes[info.quantization] += math.prod(info.shape)
        ((most_common, _),) = sizes.most_common(1)
        return "" if most_common in _FLOATING_POINT else most_common.name

    def tensor(self, name: str) -> Float32Array:
        """See `Checkpoint.tensor`. Raises ModelCorruptError for values that are not finite."""
        info = self._infos[name]
        values = _dequantized(self._ordered_rows(name), info)
        if not np.isfinite(values).all():
            raise self._not_finite(info)
        return values

    def quantized(self, name: str) -> QuantizedRows | None:
        """See `Checkpoint.quantized`. Raises ModelCorruptError for scales that are not finite."""
        info = self._infos[name]
        rows = take_apart(self._ordered_rows(name), info.quantization)
        if rows is not None and not np.isfinite(rows.scales).all():
            raise self._not_finite(info)
        if isinstance(rows, Int4Rows) and not np.isfinite(rows.minima).all():
            raise self._not_finite(info)
        return rows

    def _not_finite(self, info: TensorInfo) -> ModelCorruptError:
        return damaged(self._path, f"tensor {info.name} holds values that are not finite")

    def _ordered_rows(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, [rows, bytes per row], rows in Hugging Face order."""
        rows = self._stored_rows(self._infos[name])
        if name.endswith("self_attn.q_proj.weight"):
            return _unpermuted(rows, self._config.num_heads)
        if name.endswith("self_attn.k_proj.weight"):
            return _unpermuted(rows, self._config.num_kv_heads)
        return rows

    def _stored_rows(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        # Read, not mapped: a file that shrinks under a mapping kills the process instead of raising.
        try:
            data = np.fromfile(self._path, np.uint8, info.num_bytes, offset=info.start)
        except OSError as error:
            raise damaged(self._path, f"reading it failed ({error.strerror or error})") from error
        if data.size != info.num_bytes:
            raise damaged(self._path, "it became shorter after it was opened")
        return data.reshape(_num_rows(info), -1)


def _num_rows(info: TensorInfo) -> int:
    return 1 if len(info.shape) == 1 else info.shape[0]


def _unpermuted(rows: npt.NDArray[np.uint8], num_heads: int) -> npt.NDArray[np.uint8]:
    """Undo the converter's reordering of q and k rows: it interleaves the two halves of each head.

    Rows move whole, so this works on their quantised bytes. rows: [num_heads * head_dim, bytes per row].
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])  # [heads, head_dim / 2, 2, bytes]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _dequantized(rows: npt.NDArray[np.uint8], info: TensorInfo) -> Float32Array:
    block_elements, block_bytes = GGML_QUANT_SIZES[info.quantization]
    num_blocks = rows.size // block_bytes
    blocks_per_row = max(1, _TARGET_ROW_ELEMENTS // block_elements)
    while num_blocks % blocks_per_row:
        blocks_per_row //= 2
    # Garbage in a damaged file overflows here; the caller looks at what came out.
    with np.errstate(all="ignore"):
        values = dequantize(rows.reshape(-1, blocks_per_row * block_bytes), info.quantization)
    return np.ascontiguousarray(values, np.float32).reshape(info.shape)


def _check_kind(header: GgufHeader) -> None:
    if header.integer("split.count", 1) > 1:
        raise unsupported(header.path, "it is one part of a model split over several files")
    architecture = header.text("general.architecture")
    if architecture != "llama":
        raise unsupported(header.path, f"its architecture is {shown(architecture)}, and only 'llama' is known")
    if "rope_freqs.weight" in header.tensors:
        raise unsupported(header.path, "it scales rotary frequencies (tensor rope_freqs.weight)")
    for suffix, neutral in _NEUTRAL_VALUES.items():
        value = header.metadata.get(f"llama.{suffix}", neutral[0])
        if isinstance(value, np.ndarray) or value not in neutral:
            raise unsupported(header.path, f"it sets llama.{suffix} to {shown(str(value))}")


def _read_config(header: GgufHeader) -> ModelConfig:
    hidden_size = _positive(header, "llama.embedding_length")
    num_heads = _positive(header, "llama.attention.head_count")
    num_kv_heads = _positive(header, "llama.attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise damaged(header.path, f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    return ModelConfig(
        architecture="llama",
        num_layers=_positive(header, "llama.block_count", limit=len(header.tensors)),
        hidden_size=hidden_size,
        intermediate_size=_positive(header, "llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(header, hidden_size, num_heads),
        vocab_size=_vocab_size(header),
        max_model_len=_positive(header, "llama.context_length", limit=MAX_CONTEXT_LENGTH),
        rms_norm_eps=_positive_number(header, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=_positive_number(header, "llama.rope.freq_base", 10_000.0),
        tie_word_embeddings="output.weight" not in header.tensors,
    )


def _head_dim(header: GgufHeader, hidden_size: int, num_heads: int) -> int:
    head_dim = _positive(header, "llama.attention.key_length", hidden_size // num_heads or None)
    if head_dim % 2:
        raise damaged(header.path, f"the head dimension {head_dim} is odd")
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if header.integer(key, head_dim) != head_dim:
            raise unsupported(header.path, f"{key} differs from the head dimension {head_dim}")
    return head_dim


def _vocab_size(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise damaged(header.path, "tensor token_embd.weight is missing")
    vocab_size = embedding.shape[0]
    if header.integer("llama.vocab_size", vocab_size) != vocab_size:
        raise damaged(header.path, f"llama.vocab_size disagrees with the {vocab_size} rows of token_embd.weight")
    return vocab_size


def _positive(header: GgufHeader, key: str, default: int | None = None, limit: int = MAX_DIMENSION) -> int:
    value = header.integer(key, default)
    if not 1 <= value <= limit:
        raise damaged(header.path, f"{key} is {value}, outside 1 to {limit}")
    return value


def _positive_number(header: GgufHeader, key: str, default: float | None = None) -> float:
    value = header.number(key, default)
    if value <= 0:
        raise damaged(header.path, f"{key} is {value}, which should be above 0")
    return value


def _stored_name(name: str) -> str:
    """GGUF's name for the tensor that Hugging Face calls `name`."""
    stem = name.removesuffix(".weight")
    if stem in _TOP_LEVEL_NAMES:
        return f"{_TOP_LEVEL_NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def _check_tensors(header: GgufHeader, config: ModelConfig, stored_names: dict[str, str]) -> None:
    for name, shape in config.tensor_shapes().items():
        info = header.tensors.get(stored_names[name])
        if info is None:
            raise damaged(header.path, f"tensor {stored_names[name]} is missing")
        if info.shape != shape:
            raise damaged(header.path, f"tensor {info.name} has shape {info.shape} where {shape} is needed")
    surplus = header.tensors.keys() - stored_names.values()
    if surplus:
        raise unsupported(header.path, f"it has a tensor {shown(min(surplus))} that a Llama model does not use")
    for quantization in {info.quantization for info in header.tensors.values()}:
        _check_quantization(header.path, quantization)


def _check_quantization(path: Path, quantization: GGMLQuantizationType) -> None:
    """Ask the library, which keeps its list of types to itself, by dequantising one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[quantization][1]), np.uint8), quantization)
    except NotImplementedError as error:
        raise unsupported(path, f"the gguf library cannot dequantise its {quantization.name} tensors") from error
