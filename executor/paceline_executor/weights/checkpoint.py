"""What a model is made of: its configuration and its tensors by name.

Knows the Hugging Face tensor names of a decoder-only transformer and float32 arrays. It refuses to know file formats
(`gguf_file` does), torch, and how a model computes.
"""

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline_executor.weights.quantized_rows import QuantizedRows

Float32Array = npt.NDArray[np.float32]


class RopeScaling(enum.Enum):
    """How rotary frequencies are stretched beyond the trained context. Files that scale are refused by name."""

    NONE = "none"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer, every value checked to be positive and consistent by the reader."""

    architecture: str  # "llama"
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even; num_heads * head_dim need not equal hidden_size
    vocab_size: int
    max_model_len: int  # trained context length, in tokens
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool  # then there is no "lm_head.weight": the embedding serves for both
    rope_scaling: RopeScaling = RopeScaling.NONE

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model consists of: Hugging Face name -> shape, [out, in] for matrices."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        return {
            "input_layernorm.weight": (self.hidden_size,),
            "self_attn.q_proj.weight": (q_size, self.hidden_size),
            "self_attn.k_proj.weight": (kv_size, self.hidden_size),
            "self_attn.v_proj.weight": (kv_size, self.hidden_size),
            "self_attn.o_proj.weight": (self.hidden_size, q_size),
            "post_attention_layernorm.weight": (self.hidden_size,),
            "mlp.gate_proj.weight": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj.weight": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj.weight": (self.hidden_size, self.intermediate_size),
        }


class Checkpoint(Protocol):
    """A model's weights, complete and of the shapes `config.tensor_shapes()` says: a reader refuses anything less.

    Matrices are [out, in] and the rows of q_proj and k_proj are in Hugging Face order: rotary position embedding
    pairs dimension i of a head with i + head_dim / 2.
    """

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def quantization(self) -> str:
        """The type that most weights are stored in, such as "Q4_1"; empty for floating-point numbers."""
        ...

    def tensor(self, name: str) -> Float32Array:
        """The tensor of this Hugging Face name, C-contiguous, newly made at each call, hence the caller's to keep.

        Raises KeyError for a name that `config.tensor_shapes()` does not list.
        """
        ...

    def quantized(self, name: str) -> QuantizedRows | None:
        """The same tensor as it is stored, where that is as integers in groups of 32; None where it is not.

        Raises KeyError as `tensor` does.
        """
        ...
