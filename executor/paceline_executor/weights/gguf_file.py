"""A model out of a GGUF file: its tensors as float32, or as the integers that are stored.

Knows GGUF's tensor names, as docs/gguf.md of the ggml project lists them, and what converting a Hugging Face model to
GGUF did to the rows of a Llama's query and key projections. Dequantising is the gguf library's. It does not know the
file layout (`gguf_header` does), the metadata (`gguf_config`), the tokenizer, or how the model computes.
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
from paceline_executor.weights.gguf_config import (
    FREQUENCY_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    check_gguf_kind,
    read_gguf_config,
)
from paceline_executor.weights.gguf_header import GgufHeader, TensorInfo
from paceline_executor.weights.quantized_rows import Int4Rows, QuantizedRows, take_apart
from paceline_executor.weights.refusals import damaged, shown, unsupported

_FLOATING_POINT = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FACTOR_TENSORS = {FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS}
_MAX_FACTORS = 1 << 16  # of rotary frequencies: half a head's dimensions


def checkpoint_from_gguf(header: GgufHeader) -> "GgufCheckpoint":
    """Check what the header says of the weights, and return them ready to be read.

    Raises ModelCorruptError or UnsupportedModelError, before memory is taken for any weight.
    """
    check_gguf_kind(header)
    config = read_gguf_config(header, _frequency_factors(header))
    stored_names = {name: _stored_name(name, config) for name in config.tensor_shapes()}
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
        info = self._infos[name]
        rows = _read_bytes(self._path, info).reshape(_num_rows(info), -1)
        num_heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}.get(name.split(".")[-2])
        if self._config.architecture != "llama" or num_heads is None:  # only a Llama's are reordered
            return rows
        # A bias is one row, and its numbers move as the rows of the matrix do.
        return _unpermuted(rows.reshape(info.shape[0], -1), num_heads).reshape(rows.shape)


def _read_bytes(path: Path, info: TensorInfo) -> npt.NDArray[np.uint8]:
    # Read, not mapped: a file that shrinks under a mapping kills the process instead of raising.
    try:
        data = np.fromfile(path, np.uint8, info.num_bytes, offset=info.start)
    except OSError as error:
        raise damaged(path, f"reading it failed ({error.strerror or error})") from error
    if data.size != info.num_bytes:
        raise damaged(path, "it became shorter after it was opened")
    return data


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


def _stored_name(name: str, config: ModelConfig) -> str:
    """GGUF's name for the tensor that Hugging Face calls `name`."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_LEVEL_NAMES:
        return f"{_TOP_LEVEL_NAMES[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    names = _LAYER_NAMES | _POST_NORM_NAMES if config.post_norms else _LAYER_NAMES
    return f"blk.{layer}.{names[part]}.{kind}"


def _frequency_factors(header: GgufHeader) -> dict[str, tuple[float, ...]]:
    """The tensors by which rotary frequencies are divided: Llama 3.1 and later have one, longrope models have two."""
    factors = {}
    for name in _FACTOR_TENSORS & header.tensors.keys():
        info = header.tensors[name]
        if len(info.shape) != 1 or info.shape[0] > _MAX_FACTORS or info.quantization != GGMLQuantizationType.F32:
            raise damaged(header.path, f"tensor {name} is not a list of float32 numbers")
        values = _read_bytes(header.path, info).view(np.float32)
        if not np.isfinite(values).all():
            raise damaged(header.path, f"tensor {name} holds values that are not finite")
        factors[name] = tuple(values.tolist())
    return factors


def _check_tensors(header: GgufHeader, config: ModelConfig, stored_names: dict[str, str]) -> None:
    for name, shape in config.tensor_shapes().items():
        info = header.tensors.get(stored_names[name])
        if info is None:
            raise damaged(header.path, f"tensor {stored_names[name]} is missing")
        if info.shape != shape:
            raise damaged(header.path, f"tensor {info.name} has shape {info.shape} where {shape} is needed")
    surplus = header.tensors.keys() - stored_names.values() - _FACTOR_TENSORS
    if surplus:
        sentence = f"it has a tensor {shown(min(surplus))} that a {config.architecture} model does not use"
        raise unsupported(header.path, sentence)
    for quantization in {info.quantization for info in header.tensors.values()}:
        _check_quantization(header.path, quantization)
    for info in header.tensors.values():
        if len(info.shape) == 1 and info.quantization not in _FLOATING_POINT:
            raise unsupported(header.path, f"tensor {info.name} is one row of {info.quantization.name} numbers")


def _check_quantization(path: Path, quantization: GGMLQuantizationType) -> None:
    """Ask the library, which keeps its list of types to itself, by dequantising one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[quantization][1]), np.uint8), quantization)
    except NotImplementedError as error:
        raise unsupported(path, f"the gguf library cannot dequantise its {quantization.name} tensors") from error
