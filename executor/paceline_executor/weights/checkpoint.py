"""What a model is made of: its configuration and its tensors by name.

Knows Hugging Face's tensor names. Refuses to know file formats, torch, and how a model computes.
"""

import enum
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline_executor.weights.grouped_rows import GroupedRows, Matrix
from paceline_executor.weights.stored_tensor import StoredType
from paceline_kernels.routing import Routing

Float32Array = npt.NDArray[np.float32]
MAX_EXPERTS_IN_ALL = 1 << 16  # of all layers; the largest models in use have a third of it


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """theta is raised for contexts beyond `original_max_len`: for the longest that is served."""

    factor: float
    original_max_len: int  # trained context, in tokens


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Low frequencies are divided by `factor`. Peng et al., 2023, https://arxiv.org/abs/2309.00071."""

    factor: float
    original_max_len: int  # trained context, in tokens
    beta_fast: float  # rotations in the trained context from which on a frequency is kept; default 32
    beta_slow: float  # rotations up to which it is divided; default 1
    attention_factor: float  # of cosines and sines; default 0.1 * ln(factor) + 1
    truncate: bool = True  # both bounds are rounded to whole pairs of dimensions


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies with few rotations in the trained context are divided by `factor`."""

    factor: float
    low_freq_factor: float  # rotations up to which a frequency is divided
    high_freq_factor: float  # rotations from which on it is kept; above low_freq_factor
    original_max_len: int  # trained context, in tokens


@dataclass(frozen=True, slots=True)
class LongropeScaling:
    """Each frequency is divided by its own factor. Ding et al., 2024, https://arxiv.org/abs/2402.13753.

    Of a GGUF file's `rope_freqs.weight` short and long factors are the same, and attention_factor is 1.
    """

    short_factors: tuple[float, ...]  # head_dim / 2, for served contexts up to original_max_len
    long_factors: tuple[float, ...]  # head_dim / 2, for longer ones
    original_max_len: int  # trained context, in tokens
    attention_factor: float  # of cosines and sines; default sqrt(1 + ln(s) / ln(original_max_len)),
    # s being the model's context by original_max_len, at least 1


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongropeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float  # above 1
    scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # even: the first dimensions of a head, without a scaling; None: all are rotated


class Activation(enum.Enum):
    """The feed-forward network's gates use it."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Feed-forward networks of which each token goes through a few. Shazeer et al., 2017,
    https://arxiv.org/abs/1701.06538; one that all tokens go through: Rajbhandari et al., 2022,
    https://arxiv.org/abs/2201.05596.
    """

    routing: Routing
    intermediate_size: int  # of each expert
    sparse_layers: tuple[bool, ...]  # one per layer; the others have one network of the model's intermediate size
    shared_intermediate_size: int = 0  # of the expert that all tokens share; 0: there is none
    has_shared_gate: bool = False  # a number of its own for each token, whose sigmoid multiplies the shared expert
    held: range | None = None  # the experts that one rank has; None: all


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The reader has checked that every value is positive and consistent."""

    architecture: str  # "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen2moe", …
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of layers that are not sparse
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even; num_heads * head_dim need not equal hidden_size
    vocab_size: int
    max_model_len: int  # the longest context the model is made for, scaling of rope included, in tokens
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool  # then there is no "lm_head.weight"
    local_rope: Rope | None = None  # of sliding layers, where it differs
    sliding_window: int | None = None  # positions a token of a sliding layer sees, its own included
    sliding_layers: tuple[bool, ...] = ()  # one per layer; empty or all False without a window
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # normalised before they are rotated
    qk_norm_spans_heads: bool = False  # all heads are normalised together, not each by itself
    post_norms: bool = False  # of attention and feed-forward network
    unit_offset_norms: bool = False  # norms multiply by 1 + weight; GGUF files have the 1 added
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of q . k; None is head_dim ** -0.5
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    logit_softcap: float | None = None  # logits likewise
    experts: Mixture | None = None
    scored: range | None = None  # the tokens whose logits one rank computes, whose part "lm_head.weight" is; None: all
    whole: "ModelConfig | None" = None  # of which this is one rank's part

    def window(self, layer: int) -> int | None:
        """Positions a token sees, its own included; None for all."""
        return self.sliding_window if self.is_sliding(layer) else None

    def is_sliding(self, layer: int) -> bool:
        return self.sliding_window is not None and any(self.sliding_layers[layer : layer + 1])

    @property
    def scored_rows(self) -> slice:
        """Of a matrix with a row for each token."""
        return slice(None) if self.scored is None else slice(self.scored.start, self.scored.stop)

    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Hugging Face name -> shape, [out, in] for matrices, of which each expert has its own."""
        return _tensor_shapes(self)

    def is_sparse(self, layer: int) -> bool:
        """Whether experts are its feed-forward network."""
        return self.experts is not None and self.experts.sparse_layers[layer]

    def expert_names(self, layer: int, *parts: str) -> list[str]:
        """Those of such matrices as "gate_proj" of a sparse layer, expert by expert as far as they are held."""
        if self.experts is None:
            return []
        held = self.experts.held or range(self.experts.routing.num_experts)
        return [f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight" for expert in held for part in parts]

    def layer_shapes(self, *, is_sparse: bool) -> dict[str, tuple[int, ...]]:
        """By names inside a layer, such as "self_attn.q_proj.weight"."""
        matrices = self._matrix_shapes(is_sparse=is_sparse)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{name}.bias": (matrices[name][0],) for name in self.biased_matrices()}
        if is_sparse and self.experts is not None and self.experts.routing.has_bias:
            shapes["mlp.gate.e_score_correction_bias"] = (self.experts.routing.num_experts,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self.post_norms else []
        shapes |= {f"{name}.weight": (self.hidden_size,) for name in norms}
        if self.qk_norm:
            num_q, num_k = (self.num_heads, self.num_kv_heads) if self.qk_norm_spans_heads else (1, 1)
            shapes["self_attn.q_norm.weight"] = (num_q * self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (num_k * self.head_dim,)
        return shapes

    def _matrix_shapes(self, *, is_sparse: bool) -> dict[str, tuple[int, int]]:
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        shapes = {
            "self_attn.q_proj": (q_size, self.hidden_size),
            "self_attn.k_proj": (kv_size, self.hidden_size),
            "self_attn.v_proj": (kv_size, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, q_size),
        }
        if not is_sparse or self.experts is None:
            return shapes | self._gated_shapes("mlp", self.intermediate_size)
        experts = self.experts
        shapes["mlp.gate"] = (experts.routing.num_experts, self.hidden_size)
        for expert in experts.held or range(experts.routing.num_experts):
            shapes |= self._gated_shapes(f"mlp.experts.{expert}", experts.intermediate_size)
        if experts.shared_intermediate_size:
            shapes |= self._gated_shapes("mlp.shared_expert", experts.shared_intermediate_size)
        if experts.has_shared_gate:
            shapes["mlp.shared_expert_gate"] = (1, self.hidden_size)
        return shapes

    def _gated_shapes(self, name: str, intermediate_size: int) -> dict[str, tuple[int, int]]:
        return {
            f"{name}.gate_proj": (intermediate_size, self.hidden_size),
            f"{name}.up_proj": (intermediate_size, self.hidden_size),
            f"{name}.down_proj": (self.hidden_size, intermediate_size),
        }

    def biased_matrices(self) -> tuple[str, ...]:
        """Those of a layer that have a bias, such as "self_attn.q_proj"."""
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") if self.qkv_bias else ()
        output = ("self_attn.o_proj",) if self.attention_output_bias else ()
        return qkv + output + (("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if self.mlp_bias else ())


@functools.lru_cache(maxsize=4)  # of mixtures, tens of thousands are looked up one by one
def _tensor_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    kinds = [config.layer_shapes(is_sparse=is_sparse) for is_sparse in (False, True)]
    for layer in range(config.num_layers):
        for name, shape in kinds[config.is_sparse(layer)].items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        num_scored = config.vocab_size if config.scored is None else len(config.scored)
        shapes["lm_head.weight"] = (num_scored, config.hidden_size)
    return MappingProxyType(shapes)


@dataclass(frozen=True, slots=True)
class KvScales:
    """They are above 0, for 8-bit float keys and values."""

    keys: Float32Array  # [num_layers, num_kv_heads]
    values: Float32Array  # [num_layers, num_kv_heads]


class Checkpoint(Protocol):
    """Complete and of the shapes `config.tensor_shapes()` says: a reader refuses anything less.

    Matrices are [out, in] and the rows of q_proj and k_proj are in Hugging Face order: rotary position embedding pairs
    dimension i of a head with i + half of those that are rotated.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def quantization(self) -> str:
        """What most weights are stored as, such as "Q4_1" or "awq-int4"; empty for floats of 16 and 32 bits."""
        ...

    @property
    def stored_types(self) -> Mapping[str, StoredType]:
        """By name; empty where nothing is stored."""
        ...

    @property
    def digest(self) -> str:
        """Of the names, the shapes and the first bytes of all tensors, as they are stored: another format, or other
        training, has another. Empty for weights that nobody stored. Raises ModelCorruptError.
        """
        ...

    @property
    def kv_scales(self) -> KvScales | None:
        """For a KV cache of float8_e4m3fn; None where the file brings none."""
        ...

    def stored(self, name: str) -> Matrix:
        """Nothing is read yet, and nothing converted.

        Raises KeyError for a name that `config.tensor_shapes()` does not list.
        """
        ...

    def tensor(self, name: str) -> Float32Array:
        """As float32, C-contiguous, newly made at each call.

        Raises KeyError as `stored` does.
        """
        ...

    def quantized(self, name: str) -> GroupedRows | None:
        """As it is stored, where that is codes with scales of groups.

        Raises KeyError as `stored` does.
        """
        ...
