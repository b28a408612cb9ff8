"""EAGLE-3 heads for tests: random ones, as folders in the dialect of the authors and of the speculators library.

Knows how both publish a head, which is what the reader in `weights` has to undo. It takes nothing from that reader.
"""

import enum
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from paceline_executor.weights import ModelConfig
from paceline_executor.weights.checkpoint import Rope
from random_models import llama_fields

_LAYER_FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
)


class Dialect(enum.Enum):
    """Whose names and fields a folder has."""

    AUTHORS = "authors"
    SPECULATORS = "speculators"


@dataclass(slots=True)
class HeadParts:
    """What a folder is to contain, by the authors' names. A test changes it at will, then writes it."""

    fields: dict[str, Any]
    tensors: dict[str, npt.NDArray[np.generic]]

    def write(self, folder: Path, dialect: Dialect = Dialect.AUTHORS) -> Path:
        """Write config.json and model.safetensors. Returns the folder."""
        fields, tensors = self.fields, self.tensors
        if dialect is Dialect.SPECULATORS:
            fields = {name: value for name, value in fields.items() if name not in (*_LAYER_FIELDS, "architectures")}
            fields |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}
            fields["transformer_layer_config"] = {name: self.fields[name] for name in _LAYER_FIELDS}
            tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(tensors, folder / "model.safetensors")
        return folder


def random_head(
    target: ModelConfig,
    *,
    aux_layers: tuple[int, ...] = (2, 1),
    draft_vocab_size: int | None = None,
    hidden_size: int | None = None,
    has_embedding: bool = False,
    seed: int = 0,
) -> HeadParts:
    """A head for this target, of the target's sizes where nothing else is said; without an id map for all its tokens.

    Matrices have unit gain, norms lie around 1. aux_layers: as `AuxHidden` counts them; the authors' files
    that begin with 1 do not.
    """
    hidden, vocab = hidden_size or target.hidden_size, target.vocab_size
    drafted = draft_vocab_size or vocab
    layer = replace(target, num_layers=1, hidden_size=hidden, max_model_len=64, rms_norm_eps=1e-5, rope=Rope(10_000.0))
    fields = llama_fields(layer) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": drafted,
        "target_hidden_size": target.hidden_size,
    }
    fields["eagle_aux_hidden_state_layer_ids"] = list(aux_layers)
    queries, keys = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, len(aux_layers) * target.hidden_size),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.post_attention_layernorm": (hidden,),
        "midlayer.mlp.gate_proj": (target.intermediate_size, hidden),
        "midlayer.mlp.up_proj": (target.intermediate_size, hidden),
        "midlayer.mlp.down_proj": (hidden, target.intermediate_size),
        "norm": (hidden,),
        "lm_head": (drafted, hidden),
    }
    shapes |= {"embed_tokens": (vocab, hidden)} if has_embedding else {}
    random = np.random.default_rng(seed)
    tensors: dict[str, npt.NDArray[np.generic]] = {
        f"{name}.weight": _random(random, shape) for name, shape in shapes.items()
    }
    if drafted < vocab:
        target_ids = np.sort(random.choice(vocab, drafted, replace=False))
        tensors |= {"d2t": target_ids - np.arange(drafted), "t2d": np.isin(np.arange(vocab), target_ids)}
    return HeadParts(fields, tensors)


def _random(random: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    scale, shift = (0.125, 1.0) if len(shape) == 1 else (shape[1] ** -0.5, 0.0)
    return (random.standard_normal(shape) * scale + shift).astype(np.float32)
