"""The config.json of a Hugging Face folder, as the configuration of a decoder.

Knows the families of models that are served: what their files may leave out, and what they mean. What transformers does
is the measure. It runs no code of a folder: `auto_map` is not looked at.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline_executor.weights.checkpoint import Activation, ModelConfig, Rope
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.mixture import MixtureFields, read_mixture
from paceline_executor.weights.hf.rope import MAX_CONTEXT_LENGTH, read_rope, read_rope_object, scaled_length
from paceline_executor.weights.refusals import shown, unsupported
from paceline_kernels.routing import Score

MAX_DIMENSION = 1 << 24
MAX_LAYERS = 1 << 12
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
_Fields = dict[str, Any]
_WINDOWS = frozenset({"sliding_window", "layer_types"})
_QWEN_WINDOW_KEYS = _WINDOWS | {"use_sliding_window", "max_window_layers"}
_GEMMA3_WINDOW_KEYS = _WINDOWS | {"sliding_window_pattern"}
_WINDOW_KEYS = _QWEN_WINDOW_KEYS | _GEMMA3_WINDOW_KEYS


@dataclass(frozen=True, slots=True)
class _Family:
    """A `model_type`: what its class in transformers fills in, and what its code always does."""

    architecture: str
    model_class: str  # in transformers
    defaults: _Fields  # of keys that are absent; null stays null
    window_keys: Set[str] = _WINDOWS  # that it reads; another family's are left over from elsewhere, and mean nothing
    qkv_bias: bool = False
    qk_norm: bool = False
    is_gemma: bool = False  # four norms per layer, 1 added to their weights, scaled embedding, scaled queries
    mixture: MixtureFields | None = None


_COMMON: _Fields = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_LLAMA = _COMMON | {"max_position_embeddings": 2048}
_MISTRAL = _COMMON | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
_QWEN = _COMMON | {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096}
_QWEN |= {"max_window_layers": 28, "use_sliding_window": False}
_MIXTRAL = _COMMON | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "rope_theta": 1e6}
_MIXTRAL |= {"rms_norm_eps": 1e-5, "num_experts_per_tok": 2}
_QWEN2_MOE = _COMMON | {"max_position_embeddings": 32_768, "num_key_value_heads": 16, "qkv_bias": True}
_QWEN2_MOE |= {"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
# With a window, a file has to say which layers have it.
_QWEN2_MOE |= {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ()}
_QWEN3_MOE = _COMMON | {"max_position_embeddings": 32_768, "num_key_value_heads": 4}
_QWEN3_MOE |= {"sliding_window": 4096, "use_sliding_window": False}
_QWEN3_MOE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
_OLMOE = _COMMON | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8}
_GLM = _COMMON | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_GLM |= {"num_experts_per_tok": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True, "partial_rotary_factor": 0.5}
_GEMMA: _Fields = {
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2 = _GEMMA | {"vocab_size": 256_000, "max_position_embeddings": 8192, "sliding_window_pattern": 2}
_GEMMA2 |= {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
_GEMMA3 = _GEMMA | {"vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window_pattern": 6}

_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _Family("llama", "LlamaForCausalLM", _LLAMA, window_keys=frozenset()),
        "mistral": _Family("mistral", "MistralForCausalLM", _MISTRAL),
        "qwen2": _Family("qwen2", "Qwen2ForCausalLM", _QWEN, window_keys=_QWEN_WINDOW_KEYS, qkv_bias=True),
        "qwen3": _Family(
            "qwen3", "Qwen3ForCausalLM", _QWEN | {"head_dim": 128}, window_keys=_QWEN_WINDOW_KEYS, qk_norm=True
        ),
        "gemma2": _Family("gemma2", "Gemma2ForCausalLM", _GEMMA2, is_gemma=True),
        "gemma3_text": _Family(
            "gemma3", "Gemma3ForCausalLM", _GEMMA3, window_keys=_GEMMA3_WINDOW_KEYS, qk_norm=True, is_gemma=True
        ),
        "mixtral": _Family(
            "mixtral",
            "MixtralForCausalLM",
            _MIXTRAL,
            window_keys=frozenset({"sliding_window"}),
            mixture=MixtureFields(8, "intermediate_size", renormalises=True),
        ),
        "qwen2_moe": _Family(
            "qwen2moe",
            "Qwen2MoeForCausalLM",
            _QWEN2_MOE,
            window_keys=_WINDOWS | {"use_sliding_window"},
            mixture=MixtureFields(60, has_shared_gate=True),
        ),
        "qwen3_moe": _Family(
            "qwen3moe",
            "Qwen3MoeForCausalLM",
            _QWEN3_MOE,
            window_keys=frozenset({"sliding_window", "use_sliding_window"}),
            qk_norm=True,
            mixture=MixtureFields(128),
        ),
        "olmoe": _Family(
            "olmoe",
            "OlmoeForCausalLM",
            _OLMOE,
            window_keys=frozenset(),
            qk_norm=True,
            mixture=MixtureFields(64, "intermediate_size"),
        ),
        "glm4_moe": _Family(
            "glm4moe",
            "Glm4MoeForCausalLM",
            _GLM,
            window_keys=frozenset(),
            mixture=MixtureFields(128, score=Score.SIGMOID),
        ),
    }
)
_LATENT = "with multi-head latent attention, which is not computed"
_REFUSED = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "gpt_oss": "with attention sinks, which are not computed",
}
_BIASED = frozenset(("llama", "qwen3", "gemma2", "gemma3", "qwen3moe", "olmoe", "glm4moe"))  # attention_bias says so
_IMAGE_MODEL, _IMAGE_MODEL_CLASS = "gemma3", "Gemma3ForConditionalGeneration"


def read_hf_config(path: Path) -> ModelConfig:
    """Raises ModelNotFoundError, ModelCorruptError naming the field, or UnsupportedModelError naming the feature."""
    file = JsonFields.read(path)
    kind, model_class = file.text("model_type"), _model_class(file)
    text = file.object("text_config") if kind == _IMAGE_MODEL else None
    if text is not None:
        kind, model_class = text.text("model_type") or "gemma3_text", model_class.replace(_IMAGE_MODEL_CLASS, "")
    if (text or file).flag("use_bidirectional_attention"):
        raise unsupported(path, "it sets use_bidirectional_attention, so it does not generate text")
    family = _FAMILIES.get(kind or "")
    if family is None:
        known = ", ".join(_FAMILIES)
        why = f" {_REFUSED[kind]}" if kind in _REFUSED else ""
        raise unsupported(path, f"its model_type is {shown(str(kind))}{why}, and this version runs {known}")
    if model_class not in ("", family.model_class):
        raise unsupported(
            path, f"its architecture is {shown(model_class)}, and this version runs {family.model_class} of {kind}"
        )
    return _read_family(family, _fields_of(family, text or file))


def read_llama(config: JsonFields) -> ModelConfig:
    """The configuration of a Llama that these fields state, whatever file they stand in. Raises the same."""
    family = _FAMILIES["llama"]
    return _read_family(family, _fields_of(family, config))


def _fields_of(family: _Family, config: JsonFields) -> JsonFields:
    """What its class in transformers reads."""
    return config.without(_WINDOW_KEYS - family.window_keys).with_defaults(family.defaults)


def _model_class(file: JsonFields) -> str:
    classes = file.get("architectures")
    if classes is None or classes == []:
        return ""
    if isinstance(classes, list) and isinstance(classes[0], str):
        return classes[0]
    raise file.fault("architectures", "not a list of names")


def _read_family(family: _Family, config: JsonFields) -> ModelConfig:
    hidden_size = config.positive_integer("hidden_size", MAX_DIMENSION)
    num_layers = config.positive_integer("num_hidden_layers", MAX_LAYERS)
    num_heads = config.positive_integer("num_attention_heads", MAX_DIMENSION)
    num_kv_heads = config.positive_integer("num_key_value_heads", MAX_DIMENSION, num_heads)
    if num_heads % num_kv_heads:
        raise config.fault("num_key_value_heads", f"{num_kv_heads}, which does not divide {num_heads} attention heads")
    head_dim = config.positive_integer("head_dim", MAX_DIMENSION, hidden_size // num_heads or None)
    if head_dim % 2:
        raise config.fault("head_dim", f"{head_dim}, which is odd")
    max_len = config.positive_integer("max_position_embeddings", MAX_CONTEXT_LENGTH)
    rope, local_rope = _ropes(family, config, head_dim, max_len)
    sliding_layers = _sliding_layers(config, num_layers)
    is_biased = bool(config.flag("attention_bias")) and family.architecture in _BIASED
    experts = None if family.mixture is None else read_mixture(config, family.mixture, num_layers)
    return ModelConfig(
        architecture=family.architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.positive_integer("intermediate_size", MAX_DIMENSION),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.positive_integer("vocab_size", MAX_DIMENSION),
        max_model_len=max_len if family.is_gemma else scaled_length(rope.scaling, max_len),
        rms_norm_eps=config.positive_number("rms_norm_eps"),
        rope=rope,
        tie_word_embeddings=bool(config.flag("tie_word_embeddings")),
        local_rope=local_rope if any(sliding_layers) else None,
        sliding_window=config.positive_integer("sliding_window", MAX_CONTEXT_LENGTH) if any(sliding_layers) else None,
        sliding_layers=sliding_layers if any(sliding_layers) else (),
        qkv_bias=family.qkv_bias or is_biased or bool(config.flag("qkv_bias") and family.architecture == "qwen2moe"),
        attention_output_bias=is_biased and family.architecture != "glm4moe",
        mlp_bias=bool(config.flag("mlp_bias")) and family.architecture == "llama",
        qk_norm=family.qk_norm or bool(config.flag("use_qk_norm") and family.architecture == "glm4moe"),
        qk_norm_spans_heads=family.architecture == "olmoe",
        post_norms=family.is_gemma,
        unit_offset_norms=family.is_gemma,
        activation=_activation(config, "hidden_activation" if family.is_gemma else "hidden_act"),
        embedding_scale=math.sqrt(hidden_size) if family.is_gemma else 1.0,
        attention_scale=config.positive_number("query_pre_attn_scalar") ** -0.5 if family.is_gemma else None,
        # Gemma 3 has the key in transformers, too, and does nothing with it.
        attention_softcap=_softcap(config, "attn_logit_softcapping") if family.architecture == "gemma2" else None,
        logit_softcap=_softcap(config, "final_logit_softcapping") if family.is_gemma else None,
        experts=experts,
    )


def _ropes(family: _Family, config: JsonFields, head_dim: int, max_len: int) -> tuple[Rope, Rope | None]:
    """Of all layers, or of full and of sliding layers."""
    nested = config.object("rope_parameters")
    full = None if nested is None else nested.object(_FULL)
    sliding = None if nested is None else nested.object(_SLIDING)
    if family.architecture != "gemma3":
        if full is None:
            is_glm = family.architecture == "glm4moe"
            return read_rope(config, head_dim, max_len, 10_000.0, may_be_partial=is_glm), None
        local = None if sliding is None else read_rope_object(config, sliding, head_dim, max_len, 10_000.0)
        return read_rope_object(config, full, head_dim, max_len, 10_000.0), local
    local_theta = config.positive_number("rope_local_base_freq", 10_000.0)
    local = read_rope_object(config, sliding or config.empty(), head_dim, max_len, local_theta)
    theta = config.positive_number("rope_theta", 1_000_000.0)
    if full is None:
        # It reads neither the parameters of other families nor the older spelling of a scaling's type.
        full = (config.object("rope_scaling") or config.empty()).without({"type"})
    return read_rope_object(config, full, head_dim, max_len, theta), local


def _sliding_layers(config: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """Which layers see a window only."""
    if config.get("sliding_window") is None or config.flag("use_sliding_window") is False:
        return ()
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise config.fault("layer_types", f"not a list of {num_layers} names")
        if any(kind not in (_SLIDING, _FULL) for kind in kinds):
            raise unsupported(config.path, f"{config.name('layer_types')} has others than {_SLIDING} and {_FULL}")
        return tuple(kind == _SLIDING for kind in kinds)
    if config.get("sliding_window_pattern") is not None:
        pattern = config.positive_integer("sliding_window_pattern", MAX_LAYERS)
        return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    first = 0
    if config.get("max_window_layers") is not None:
        first = config.whole_number("max_window_layers", MAX_LAYERS)
    return tuple(layer >= first for layer in range(num_layers))


def _activation(config: JsonFields, field: str) -> Activation:
    name = config.text(field)
    if name not in _ACTIVATIONS:
        raise unsupported(config.path, f"its {config.name(field)} is {shown(str(name))}")
    return _ACTIVATIONS[name]


def _softcap(config: JsonFields, field: str) -> float | None:
    return None if config.get(field) is None else config.positive_number(field)
