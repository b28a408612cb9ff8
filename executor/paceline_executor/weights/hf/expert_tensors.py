"""The tensors of a mixture's experts by one name each, however a folder spells or stacks them.

Files name the matrices of each expert, as Qwen does or in Mixtral's own way; transformers 5 may stack those of a layer
into two tensors. Refuses to know configurations' files, and how numbers are stored.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline_executor.weights.checkpoint import ModelConfig
from paceline_executor.weights.cuts import of_expert
from paceline_executor.weights.grouped_rows import Matrix
from paceline_executor.weights.hf.quantised.parts import Part
from paceline_executor.weights.refusals import damaged, shown, unsupported
from paceline_executor.weights.stored_tensor import StoredTensor

_PARTS = ("gate_proj", "up_proj", "down_proj")
_SPELLINGS = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
    ".shared_experts.": ".shared_expert.",
}
_STACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


def experts_apart(config: ModelConfig, name: str, tensor: Part) -> Iterator[tuple[str, Part]]:
    """The tensor by Hugging Face name, or its parts by theirs. Raises ModelCorruptError for stacks of another shape."""
    if ".block_sparse_moe." in name or ".shared_experts." in name:
        for theirs, ours in _SPELLINGS.items():
            name = name.replace(theirs, ours)
    stacked = _STACKED.fullmatch(name)
    if stacked is None or config.experts is None or not isinstance(tensor, StoredTensor):
        yield name, tensor
        return
    size, hidden_size = config.experts.intermediate_size, config.hidden_size
    matrix = (hidden_size, size) if stacked[2] == "down_proj" else (2 * size, hidden_size)
    shape = (config.experts.routing.num_experts, *matrix)
    if tensor.shape != shape:
        raise damaged(tensor.source.path, f"tensor {shown(name)} has shape {tensor.shape} where {shape} is needed")
    parts = {"down_proj": slice(0, hidden_size)}
    if stacked[2] != "down_proj":
        parts = {"gate_proj": slice(0, size), "up_proj": slice(size, 2 * size)}
    for expert in range(shape[0]):
        for part, rows in parts.items():
            yield f"{stacked[1]}.{expert}.{part}.weight", of_expert(tensor, expert, rows)


def check_experts(folder: Path, config: ModelConfig, tensors: Mapping[str, Matrix]) -> None:
    """Those of a layer are computed together. Raises UnsupportedModelError where they are not of one type."""
    for layer in filter(config.is_sparse, range(config.num_layers)):
        of_layer = f"model.layers.{layer}.mlp.experts"
        for part in _PARTS:
            first = tensors[f"{of_layer}.0.{part}.weight"].stored
            for expert in range(1, config.experts.routing.num_experts if config.experts else 0):
                name = f"{of_layer}.{expert}.{part}.weight"
                if tensors[name].stored != first:
                    raise unsupported(folder, f"tensor {name} is not stored as that of expert 0 is")
