"""Models for tests: a tiny random one, the same as a GGUF file or config.json, and where the default real one lies.

Knows how llama.cpp's converter writes a Llama model. It takes nothing from the reader in `weights` but the shape of a
configuration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from paceline.process.options import default_cache_dir
from paceline_executor.weights import DEFAULT_MODEL, ModelConfig, resolve_model
from paceline_executor.weights.checkpoint import (
    Activation,
    Checkpoint,
    Float32Array,
    KvScales,
    LinearScaling,
    Mixture,
    Rope,
)
from paceline_executor.weights.dummy import DummyCheckpoint
from paceline_executor.weights.grouped_rows import GroupedRows, Matrix
from paceline_executor.weights.stored_tensor import FloatType, StoredType
from paceline_kernels.routing import Routing, Score

TINY_CONFIG = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=272,
    max_model_len=256,
    rms_norm_eps=2.0**-17,  # GGUF keeps it in float32: a power of two survives
    rope=Rope(10_000.0),
    tie_word_embeddings=True,
)

_Options = dict[str, Any]
_WINDOW: _Options = {"sliding_window": 20, "sliding_layers": (True, False)}
_GEMMA: _Options = _WINDOW | {"post_norms": True, "unit_offset_norms": True, "activation": Activation.GELU_TANH}
_GEMMA |= {"embedding_scale": 8.0, "attention_scale": 0.3}
_FAMILIES: Mapping[str, _Options] = {
    "llama": {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 20, "sliding_layers": (True, True)},
    "qwen2": _WINDOW | {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "qkv_bias": True, "attention_output_bias": True, "tie_word_embeddings": False},
    "gemma2": _GEMMA | {"attention_softcap": 2.0, "logit_softcap": 3.0},
    "gemma3": _GEMMA | {"qk_norm": True, "rope": Rope(1e6, LinearScaling(8.0)), "local_rope": Rope(10_000.0)},
}
# What each family adds to a Llama, with values that are felt.
FAMILY_CONFIGS = {
    family: replace(TINY_CONFIG, architecture=family, head_dim=32, **options) for family, options in _FAMILIES.items()
}

_MIXTURES: Mapping[str, _Options] = {
    "mixtral": {"experts": Mixture(Routing(4, 2), 48, (True, True)), "sliding_window": 20},
    "qwen2moe": {
        "experts": Mixture(Routing(8, 3, renormalises=False), 48, (True, True), 80, has_shared_gate=True),
        "qkv_bias": True,
    },
    "qwen3moe": {"experts": Mixture(Routing(8, 3), 48, (False, True)), "qk_norm": True},
    "olmoe": {
        "experts": Mixture(Routing(8, 8, renormalises=False), 48, (True, True)),
        "qk_norm": True,
        "qk_norm_spans_heads": True,
    },
    "glm4moe": {
        "experts": Mixture(Routing(8, 2, Score.SIGMOID, True, 2.5, True, 4, 2), 48, (False, True), 48),
        "rope": Rope(10_000.0, rotary_dim=16),
        "qk_norm": True,
        "qkv_bias": True,
    },
}
# Every way to choose experts, one of them all; two have a dense layer first.
MIXTURE_CONFIGS = {
    family: replace(TINY_CONFIG, architecture=family, head_dim=32, tie_word_embeddings=False, **options)
    for family, options in _MIXTURES.items()
}

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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

MetadataInput = bool | int | float | str | list[str] | list[int] | list[float]


def default_model_path(environ: Mapping[str, str]) -> Path:
    """Fetched into the cache that `environ` names unless it is there."""
    return resolve_model(DEFAULT_MODEL, cache_dir=default_cache_dir(environ), on_progress=lambda _: None)


class RandomCheckpoint(DummyCheckpoint):
    """Norms and biases count, too; the same for the same configuration and seed."""

    def __init__(self, config: ModelConfig = TINY_CONFIG, seed: int = 0) -> None:
        super().__init__(config)
        self._seed = seed

    @property
    def stored_types(self) -> Mapping[str, StoredType]:
        return dict.fromkeys(self.config.tensor_shapes(), FloatType.FLOAT32)

    def tensor(self, name: str) -> Float32Array:
        """Matrices have unit gain on average, norms lie around 1."""
        shape = self.config.tensor_shapes()[name]
        generator = np.random.default_rng([self._seed, *name.encode()])
        noise = generator.standard_normal(shape, np.float32)
        scale, shift = (0.125, 1.0) if len(shape) == 1 else (shape[1] ** -0.5, 0.0)
        return noise * np.float32(scale) + np.float32(shift)


@dataclass(slots=True)
class GgufParts:
    """A test changes it at will, then writes it."""

    metadata: dict[str, MetadataInput]
    tensors: dict[str, tuple[npt.NDArray[np.generic], GGMLQuantizationType]] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Writes ints as uint32, floats as float32. Returns `path`."""
        rest = dict(self.metadata)
        writer = gguf.GGUFWriter(path, str(rest.pop("general.architecture")))
        for key, value in rest.items():
            _add(writer, key, value)
        for name, (data, quantization) in self.tensors.items():
            writer.add_tensor(name, data, raw_dtype=quantization)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def llama_fields(config: ModelConfig) -> dict[str, Any]:
    """What the config.json of a Llama of these sizes says."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def gguf_parts(
    checkpoint: RandomCheckpoint, quantization: GGMLQuantizationType = GGMLQuantizationType.F32
) -> GgufParts:
    """As llama.cpp's converter would write it, with a byte-level tokenizer of a few merges.

    quantization: of the matrices, one of the types the gguf library can quantise to; norms stay float32.
    """
    config = checkpoint.config
    parts = GgufParts(_model_metadata(config) | byte_level_metadata())
    for name, shape in config.tensor_shapes().items():
        values = _as_stored(name, checkpoint.tensor(name), config)
        kind = GGMLQuantizationType.F32 if len(shape) == 1 else quantization
        parts.tensors[gguf_name(name)] = (gguf.quantize(values, kind), kind)
    return parts


def gguf_mixture(
    checkpoint: RandomCheckpoint, quantization: GGMLQuantizationType, downs: GGMLQuantizationType | None = None
) -> GgufParts:
    """The same of one whose layers all have the experts of a Mixtral. downs: their type, where it is another one."""
    config = checkpoint.config
    assert config.experts is not None
    num_experts = config.experts.routing.num_experts
    parts = gguf_parts(RandomCheckpoint(replace(config, architecture="llama", experts=None)), quantization)
    parts.metadata |= {
        "llama.expert_count": num_experts,
        "llama.expert_used_count": config.experts.routing.top_k,
        "llama.expert_feed_forward_length": config.experts.intermediate_size,
    }
    for layer in range(config.num_layers):
        ours, theirs = f"model.layers.{layer}.mlp", f"blk.{layer}.ffn"
        router = checkpoint.tensor(f"{ours}.gate.weight")
        parts.tensors[f"{theirs}_gate_inp.weight"] = (router, GGMLQuantizationType.F32)
        for part in ("gate", "up", "down"):
            matrices = [
                checkpoint.tensor(f"{ours}.experts.{expert}.{part}_proj.weight") for expert in range(num_experts)
            ]
            kind = downs or quantization if part == "down" else quantization
            del parts.tensors[f"{theirs}_{part}.weight"]
            parts.tensors[f"{theirs}_{part}_exps.weight"] = (gguf.quantize(np.stack(matrices), kind), kind)
    return parts


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_NAMES[part]}.weight"
    return f"{GGUF_NAMES[stem]}.weight"


def byte_level_metadata(
    merges: Sequence[str] = ("h e", "Ġ t", "Ġt he"), pre: str = "smollm"
) -> dict[str, MetadataInput]:
    """Three control tokens, the 256 bytes, then what each merge leads to."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *BYTE_LETTERS, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(control) + [1] * (len(tokens) - len(control)),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def _byte_letters() -> list[str]:
    """How GPT-2 writes them: printable Latin-1 as itself, the others as the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(256)]


BYTE_LETTERS = _byte_letters()


def _model_metadata(config: ModelConfig) -> dict[str, MetadataInput]:
    return {
        "general.architecture": config.architecture,
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_model_len,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope.theta,
        "llama.vocab_size": config.vocab_size,
    }


def _as_stored(name: str, values: Float32Array, config: ModelConfig) -> Float32Array:
    """llama.cpp pairs neighbouring dimensions for rotary embedding: its converter interleaves each head's halves."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    halves = values.reshape(heads, 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _add(writer: gguf.GGUFWriter, key: str, value: MetadataInput) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def tiny_checkpoint(
    *,
    num_layers: int = 2,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 80,
    vocab_size: int = 512,
    max_model_len: int = 1024,
    tie_word_embeddings: bool = True,
    architecture: str = "llama",
    seed: int = 0,
) -> Checkpoint:
    """The hidden size is num_heads * head_dim; num_kv_heads divides num_heads."""
    config = ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=num_heads * head_dim,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        rms_norm_eps=1e-5,
        rope=Rope(10_000.0),
        tie_word_embeddings=tie_word_embeddings,
    )
    return RandomCheckpoint(config, seed)


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """A checkpoint without its last layers: a drafter that is often wrong."""

    whole: Checkpoint
    num_layers: int

    @property
    def config(self) -> ModelConfig:
        return replace(self.whole.config, num_layers=self.num_layers)

    @property
    def quantization(self) -> str:
        return self.whole.quantization

    @property
    def kv_scales(self) -> KvScales | None:
        return None

    def stored(self, name: str) -> Matrix:
        return self.whole.stored(name)

    def tensor(self, name: str) -> Float32Array:
        return self.whole.tensor(name)

    def quantized(self, name: str) -> GroupedRows | None:
        return self.whole.quantized(name)
