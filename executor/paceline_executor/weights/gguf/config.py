"""The metadata of a GGUF file, as the configuration of a decoder.

Knows GGUF's keys as docs/gguf.md of the ggml project lists them; where they leave something open it does what llama.cpp
does, whose format this is. Refuses to know how tensors are stored.
"""

import math
from dataclasses import dataclass

import numpy as np

from paceline_executor.weights.checkpoint import (
    Activation,
    LinearScaling,
    LongropeScaling,
    ModelConfig,
    Rope,
    RopeScaling,
    YarnScaling,
)
from paceline_executor.weights.gguf.header import GgufHeader
from paceline_executor.weights.gguf.mixture import MixtureKeys, read_mixture
from paceline_executor.weights.hf.rope import MAX_CONTEXT_LENGTH, scaled_length
from paceline_executor.weights.refusals import damaged, shown, unsupported, wrong
from paceline_kernels.routing import Score

MAX_DIMENSION = 1 << 24
FREQUENCY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

# Keys that change what the model computes, with values under which they change nothing.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "rope.scale_linear": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}
_NO_EXPERTS: dict[str, tuple[object, ...]] = {"expert_count": (0,)}
_SOFTCAPS = {"attn_logit_softcapping": (0,), "final_logit_softcapping": (0,)}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """llama.cpp knows this of an architecture without the file."""

    name: str
    is_gemma: bool = False  # four norms per layer, scaled embedding, GELU
    qk_norm: bool = False
    full_layer_period: int | None = None  # every one of so many layers sees everything
    local_theta: float | None = None  # of sliding layers, where it differs
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    num_layers_27b: int | None = None  # the size whose queries are scaled by hidden_size / num_heads
    mixture: MixtureKeys | None = None


_GLM = "glm4moe"  # rotates half of a head, and may normalise heads
_ARCHITECTURES = {
    "llama": _Architecture("llama", mixture=MixtureKeys(renormalises=True)),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3", qk_norm=True),
    "qwen2moe": _Architecture("qwen2moe", mixture=MixtureKeys(renormalises=False, has_shared_gate=True)),
    "qwen3moe": _Architecture("qwen3moe", qk_norm=True, mixture=MixtureKeys(renormalises=True)),
    "olmoe": _Architecture("olmoe", qk_norm=True, mixture=MixtureKeys(renormalises=False)),
    _GLM: _Architecture(_GLM, mixture=MixtureKeys(renormalises=False, score=Score.SIGMOID)),
    "gemma2": _Architecture(
        "gemma2", is_gemma=True, full_layer_period=2, attention_softcap=50.0, logit_softcap=30.0, num_layers_27b=46
    ),
    "gemma3": _Architecture(
        "gemma3", is_gemma=True, qk_norm=True, full_layer_period=6, local_theta=10_000.0, num_layers_27b=62
    ),
}


def check_gguf_kind(header: GgufHeader) -> None:
    """Raises UnsupportedModelError for an architecture or feature that is not served, naming it."""
    if header.integer("split.count", 1) > 1:
        raise unsupported(header.path, "it is one part of a model split over several files")
    name = header.text("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise unsupported(header.path, f"its architecture is {shown(name)}, and this version runs {known}")
    architecture = _ARCHITECTURES[name]
    neutral_values = _NEUTRAL_VALUES if architecture.is_gemma else _NEUTRAL_VALUES | _SOFTCAPS
    if architecture.mixture is None:
        neutral_values = neutral_values | _NO_EXPERTS
    for suffix, neutral in neutral_values.items():
        value = header.metadata.get(f"{name}.{suffix}", neutral[0])
        if isinstance(value, np.ndarray) or value not in neutral:
            raise unsupported(header.path, f"it sets {name}.{suffix} to {shown(str(value))}")


def drafting_layers(header: GgufHeader) -> range:
    """The last layers of GLM's files, which are not read. Raises ModelCorruptError."""
    if header.text("general.architecture") != _GLM:
        return range(0)
    end, count = header.integer(f"{_GLM}.block_count"), header.integer(f"{_GLM}.nextn_predict_layers", 0)
    if not 0 <= count < end:
        raise wrong(header.path, f"{_GLM}.nextn_predict_layers is {count}, and there are {end} layers in all")
    return range(end - count, end)


def read_gguf_config(header: GgufHeader, frequency_factors: dict[str, tuple[float, ...]]) -> ModelConfig:
    """`check_gguf_kind` has accepted the header.

    frequency_factors: contents of those of the three tensors of rotary frequencies that the file has. Raises
    ModelCorruptError naming the key, or UnsupportedModelError naming the feature.
    """
    architecture = _ARCHITECTURES[header.text("general.architecture")]
    return _ConfigReader(header, architecture, frequency_factors).config()


class _ConfigReader:
    def __init__(
        self, header: GgufHeader, architecture: _Architecture, frequency_factors: dict[str, tuple[float, ...]]
    ) -> None:
        self._header = header
        self._architecture = architecture
        self._frequency_factors = frequency_factors

    def config(self) -> ModelConfig:
        architecture, header = self._architecture, self._header
        hidden_size, num_heads = self._positive("embedding_length"), self._positive("attention.head_count")
        num_kv_heads = self._positive("attention.head_count_kv", num_heads)
        if num_heads % num_kv_heads:
            key = self._key("attention.head_count_kv")
            raise wrong(header.path, f"{key} is {num_kv_heads}, which does not divide {num_heads} attention heads")
        num_layers = self._positive("block_count", limit=len(header.tensors)) - len(drafting_layers(header))
        head_dim = self._head_dim(hidden_size, num_heads)
        max_len = self._positive("context_length", limit=MAX_CONTEXT_LENGTH)
        scaling, rotary_dim = self._scaling(max_len, head_dim), self._rotary_dim(head_dim)
        rope = Rope(self._theta("rope.freq_base", 10_000.0), scaling, rotary_dim)
        if rope.scaling is not None and rope.rotary_dim is not None:
            raise unsupported(
                header.path, f"it scales rotations of a part of each head ({self._key('rope.scaling.type')})"
            )
        experts, is_glm = None, architecture.name == _GLM
        if architecture.mixture is not None:
            experts = read_mixture(header, architecture.name, architecture.mixture, num_layers)
        window, sliding_layers = self._window(num_layers)
        local_theta = architecture.local_theta
        has_local_rope = local_theta is not None and window is not None
        return ModelConfig(
            architecture=architecture.name,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=self._positive("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=self._vocab_size(),
            max_model_len=max_len if architecture.is_gemma else scaled_length(rope.scaling, max_len),
            rms_norm_eps=self._positive_number("attention.layer_norm_rms_epsilon"),
            rope=rope,
            tie_word_embeddings="output.weight" not in header.tensors,
            local_rope=Rope(self._theta("rope.freq_base_swa", local_theta)) if has_local_rope else None,
            sliding_window=window,
            sliding_layers=sliding_layers,
            qkv_bias="blk.0.attn_q.bias" in header.tensors,
            attention_output_bias="blk.0.attn_output.bias" in header.tensors,
            mlp_bias="blk.0.ffn_up.bias" in header.tensors and experts is None,
            qk_norm=architecture.qk_norm or (is_glm and "blk.0.attn_q_norm.weight" in header.tensors),
            qk_norm_spans_heads=architecture.name == "olmoe",
            post_norms=architecture.is_gemma,
            activation=Activation.GELU_TANH if architecture.is_gemma else Activation.SILU,
            embedding_scale=math.sqrt(hidden_size) if architecture.is_gemma else 1.0,
            attention_scale=self._attention_scale(hidden_size, num_heads, num_layers),
            attention_softcap=self._softcap("attn_logit_softcapping", architecture.attention_softcap),
            logit_softcap=self._softcap("final_logit_softcapping", architecture.logit_softcap),
            experts=experts,
        )

    def _key(self, suffix: str) -> str:
        return f"{self._architecture.name}.{suffix}"

    def _positive(self, suffix: str, default: int | None = None, limit: int = MAX_DIMENSION) -> int:
        value = self._header.integer(self._key(suffix), default)
        if not 1 <= value <= limit:
            raise wrong(self._header.path, f"{self._key(suffix)} is {value}, outside 1 to {limit}")
        return value

    def _positive_number(self, suffix: str, default: float | None = None) -> float:
        value = self._header.number(self._key(suffix), default)
        if value <= 0:
            raise wrong(self._header.path, f"{self._key(suffix)} is {value}, which should be above 0")
        return value

    def _optional_number(self, suffix: str) -> float | None:
        """The format writes 0 for none."""
        return self._header.number(self._key(suffix), 0.0) or None

    def _theta(self, suffix: str, default: float | None) -> float:
        theta = self._positive_number(suffix, default)
        if theta <= 1:
            raise wrong(self._header.path, f"{self._key(suffix)} is {theta}, which should be above 1")
        return theta

    def _head_dim(self, hidden_size: int, num_heads: int) -> int:
        head_dim = self._positive("attention.key_length", hidden_size // num_heads or None)
        if head_dim % 2:
            raise wrong(self._header.path, f"{self._key('attention.key_length')} is {head_dim}, which is odd")
        suffixes = ("attention.value_length", "rope.dimension_count")
        for suffix in suffixes[:1] if self._architecture.name == _GLM else suffixes:
            if self._header.integer(self._key(suffix), head_dim) != head_dim:
                raise unsupported(self._header.path, f"{self._key(suffix)} differs from the head dimension {head_dim}")
        return head_dim

    def _rotary_dim(self, head_dim: int) -> int | None:
        rotary_dim = self._positive("rope.dimension_count", head_dim, head_dim)
        if rotary_dim % 2:
            raise wrong(self._header.path, f"{self._key('rope.dimension_count')} is {rotary_dim}, which is odd")
        return rotary_dim if rotary_dim < head_dim else None

    def _vocab_size(self) -> int:
        embedding = self._header.tensors.get("token_embd.weight")
        if embedding is None:
            raise damaged(self._header.path, "tensor token_embd.weight is missing")
        vocab_size = embedding.shape[0]
        key = self._key("vocab_size")
        if self._header.integer(key, vocab_size) != vocab_size:
            raise wrong(self._header.path, f"{key} disagrees with the {vocab_size} rows of token_embd.weight")
        return vocab_size

    def _scaling(self, max_len: int, head_dim: int) -> RopeScaling | None:
        kind = self._header.text(self._key("rope.scaling.type"), "linear")
        factor = self._optional_number("rope.scaling.factor") or 1.0
        if factor < 0:
            raise wrong(self._header.path, f"{self._key('rope.scaling.factor')} is {factor}, which should be above 0")
        if self._frequency_factors:
            if kind == "yarn" or factor != 1:
                raise unsupported(
                    self._header.path, f"it scales rotary frequencies twice, by tensors and by {shown(kind)}"
                )
            return self._longrope(max_len, head_dim)
        if kind in ("none", "longrope"):  # the latter without its tensors, as llama.cpp has it
            return None
        if kind == "linear":
            return None if factor == 1 else LinearScaling(factor)
        if kind == "yarn":
            return self._yarn(factor, max_len)
        raise unsupported(self._header.path, f"{self._key('rope.scaling.type')} {shown(kind)} is not known")

    def _yarn(self, factor: float, max_len: int) -> YarnScaling:
        return YarnScaling(
            factor=factor,
            original_max_len=self._original_max_len(max_len),
            beta_fast=self._positive_number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self._positive_number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=self._positive_number("rope.scaling.attn_factor", 1.0)
            * (0.1 * math.log(max(factor, 1.0)) + 1.0),
        )

    def _longrope(self, max_len: int, head_dim: int) -> LongropeScaling:
        found = self._frequency_factors
        both = found.get(FREQUENCY_FACTORS)
        short, long = (both, both) if both else (found.get(SHORT_FACTORS), found.get(LONG_FACTORS))
        if short is None or long is None or not len(short) == len(long) == head_dim // 2:
            raise damaged(self._header.path, f"its factors of rotary frequencies are not {head_dim // 2} numbers")
        if min(*short, *long) <= 0:
            raise damaged(self._header.path, "a factor of rotary frequencies is not above 0")
        attention_factor = self._positive_number("rope.scaling.attn_factor", 1.0)
        return LongropeScaling(short, long, self._original_max_len(max_len), attention_factor)

    def _original_max_len(self, max_len: int) -> int:
        return self._positive("rope.scaling.original_context_length", max_len, MAX_CONTEXT_LENGTH)

    def _window(self, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """Also return which layers have it."""
        if self._header.integer(self._key("attention.sliding_window"), 4096 if self._architecture.is_gemma else 0) == 0:
            return None, ()
        window = self._positive("attention.sliding_window", 4096, MAX_CONTEXT_LENGTH)
        key = self._key("attention.sliding_window_pattern")
        if isinstance(self._header.metadata.get(key), np.ndarray):
            layers = tuple(bool(value) for value in self._header.numbers(key))
            if len(layers) != num_layers:
                raise wrong(self._header.path, f"{key} is not one value for each of {num_layers} layers")
        else:
            period = self._header.integer(key, self._architecture.full_layer_period or 0)
            layers = tuple(period <= 0 or (layer + 1) % period != 0 for layer in range(num_layers))
        return (window, layers) if any(layers) else (None, ())

    def _attention_scale(self, hidden_size: int, num_heads: int, num_layers: int) -> float | None:
        stated = self._optional_number("attention.scale")
        is_27b = num_layers == self._architecture.num_layers_27b
        return (hidden_size / num_heads) ** -0.5 if stated is None and is_27b else stated

    def _softcap(self, suffix: str, default: float | None) -> float | None:
        value = self._header.number(self._key(suffix), default or 0.0)
        if value < 0:
            raise wrong(self._header.path, f"{self._key(suffix)} is {value}, which should not be below 0")
        return value or None
