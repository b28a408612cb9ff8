"""The config.json of an EAGLE-3 head, in the dialect of its authors or in that of the speculators library.

Knows what each dialect calls what, and what it leaves out. It refuses to know tensors (`eagle3` does), and how a
head computes. Li et al., 2025, https://arxiv.org/abs/2503.01840.
"""

from dataclasses import dataclass
from pathlib import Path

from paceline_executor.errors import UnsupportedModelError
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_executor.weights.hf.config import MAX_DIMENSION, read_llama
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.refusals import shown, unsupported

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    layer: ModelConfig  # of its one layer; vocab_size is the target's
    draft_vocab_size: int  # at most vocab_size
    target_hidden_size: int
    aux_layers: tuple[int, ...]  # of the target: what flows into them is what the head reads
    norm_before_residual: bool  # whether the residual of attention is the normalised feature

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of floats by its published name, but for an embedding, which may be the target's."""
        layer, hidden = self.layer, self.layer.hidden_size
        queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.aux_layers) * self.target_hidden_size),
            "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, queries),
            "midlayer.mlp.gate_proj.weight": (layer.intermediate_size, hidden),
            "midlayer.mlp.up_proj.weight": (layer.intermediate_size, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, layer.intermediate_size),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        return shapes | dict.fromkeys([*(f"midlayer.{norm}.weight" for norm in norms), "norm.weight"], (hidden,))


def read_eagle3_config(path: Path, target: ModelConfig) -> Eagle3Config:
    """Raises ModelNotFoundError, ModelCorruptError naming the field, or UnsupportedModelError, also for a head that was
    made for another target.
    """
    file = JsonFields.read(path)
    is_of_speculators = file.get("speculators_model_type") is not None
    layer = _read_layer(file, is_of_speculators)
    target_hidden_size = file.positive_integer("target_hidden_size", MAX_DIMENSION, layer.hidden_size)
    for name, stated, needed in (
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("target_hidden_size", target_hidden_size, target.hidden_size),
    ):
        if stated != needed:
            raise _for_another_target(path, f"{name} is {stated}, and that of the model is {needed}")
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=file.positive_integer("draft_vocab_size", layer.vocab_size, layer.vocab_size),
        target_hidden_size=target_hidden_size,
        aux_layers=_read_aux_layers(file, target.num_layers, is_of_speculators),
        norm_before_residual=bool(file.flag("norm_before_residual")),
    )


def _read_layer(file: JsonFields, is_of_speculators: bool) -> ModelConfig:
    fields: JsonFields | None = file
    if is_of_speculators:
        kind = file.text("speculators_model_type")
        if kind != "eagle3":
            raise unsupported(file.path, f"its speculators_model_type is {shown(str(kind))}, not 'eagle3'")
        fields = file.object("transformer_layer_config")
        if fields is None:
            raise file.fault("transformer_layer_config", "missing")
    elif file.get("architectures") not in [[name] for name in _ARCHITECTURES]:
        raise unsupported(file.path, f"its architectures are not one of {', '.join(_ARCHITECTURES)}: no EAGLE-3 head")
    assert fields is not None
    kind = fields.text("model_type")
    if kind not in (None, "llama"):
        raise unsupported(file.path, f"{fields.name('model_type')} is {shown(str(kind))}, not 'llama'")
    if file.flag("norm_before_fc"):
        raise unsupported(file.path, "it sets norm_before_fc")
    layer = read_llama(fields)
    if layer.num_layers != 1:
        raise unsupported(file.path, f"{fields.name('num_hidden_layers')} is {layer.num_layers}; a head has one layer")
    if layer.biased_matrices():
        raise unsupported(file.path, "its matrices have biases")
    return layer


def _read_aux_layers(file: JsonFields, num_layers: int, is_of_speculators: bool) -> tuple[int, ...]:
    """Layers of the target whose inputs the head reads.

    A number is that of the layer that a state flows into, as of the three that count where a file is silent. Some files
    of the authors' dialect number the layers that states come out of, and are known by their first number, 1.
    """
    nested = file.object("eagle_config") or file.empty()
    if nested.flag("use_aux_hidden_state") is False:
        raise unsupported(file.path, f"it sets {nested.name('use_aux_hidden_state')} to false")
    fields = file if file.get(_LAYER_IDS) is not None else nested
    stated = fields.get(_LAYER_IDS)
    layers = (2, num_layers // 2, num_layers - 3) if stated is None else _whole_numbers(fields, stated)
    if layers[0] == 1 and not is_of_speculators:
        layers = tuple(layer + 1 for layer in layers)
    if len(set(layers)) < len(layers) or not all(1 <= layer < num_layers for layer in layers):
        numbers = f"{', '.join(map(str, layers))}{' by default' if stated is None else ''}"
        raise _for_another_target(file.path, f"it reads layers {numbers} of {num_layers}")
    return layers


def _whole_numbers(fields: JsonFields, stated: object) -> tuple[int, ...]:
    if not isinstance(stated, list) or not stated or not all(type(number) is int for number in stated):
        raise fields.fault(_LAYER_IDS, "not a list of integers")
    return tuple(stated)


def _for_another_target(path: Path, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path} is of a head for another model: {reason}; choose one trained for this model")
