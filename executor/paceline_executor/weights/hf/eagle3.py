"""An EAGLE-3 head out of a folder: config.json and safetensors files, in either dialect.

Knows the names of a head's tensors, and the map from its own vocabulary to the target's. It refuses to know how a head
computes (`models.eagle3` does).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline_executor.weights.checkpoint import Float32Array, ModelConfig
from paceline_executor.weights.hf.eagle3_config import Eagle3Config, read_eagle3_config
from paceline_executor.weights.hf.safetensors_folder import CONFIG_FILE, is_safetensors_folder, read_headers
from paceline_executor.weights.refusals import UNSAFE_SUFFIXES, damaged, shown, unsupported
from paceline_executor.weights.stored_checkpoint import as_float32
from paceline_executor.weights.stored_tensor import FloatType, Int64Array, StoredIntegers, StoredTensor

EMBEDDING = "embed_tokens.weight"
_TO_TARGET, _TO_DRAFT = "d2t", "t2d"
_Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """Complete, of the shapes that its configuration says, read on demand."""

    config: Eagle3Config
    target_ids: _Int32Array | None  # [draft_vocab_size] the target's id of every own one; None where they are the same
    tensors: Mapping[str, StoredTensor]

    @property
    def has_embedding(self) -> bool:
        return EMBEDDING in self.tensors

    def tensor(self, name: str) -> Float32Array:
        """Raises ModelCorruptError for values that are not finite."""
        return as_float32(self.tensors[name])

    def num_parameters(self) -> int:
        return sum(tensor.num_rows * tensor.row_numbers for tensor in self.tensors.values())


def eagle3_from_folder(folder: Path, target: ModelConfig) -> Eagle3Checkpoint:
    """Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError."""
    config = read_eagle3_config(folder / CONFIG_FILE, target)
    if not is_safetensors_folder(folder):
        unsafe = next((file.name for file in sorted(folder.iterdir()) if file.suffix in UNSAFE_SUFFIXES), None)
        found = f"{unsafe} is not read, because such a file can run code" if unsafe else "it has no model.safetensors"
        raise unsupported(folder, f"{found}; convert the head to safetensors")
    floats: dict[str, StoredTensor] = {}
    integers: dict[str, StoredIntegers] = {}
    for stored_name, tensor in read_headers(folder):
        name = _published_name(stored_name)
        if name in floats or name in integers:
            raise damaged(tensor.source.path, f"tensor {shown(stored_name)} appears twice")
        if isinstance(tensor, StoredIntegers):
            integers[name] = tensor
        elif tensor.stored is FloatType.FLOAT8_E4M3FN:
            raise unsupported(folder, f"tensor {shown(stored_name)} is float8; a head's are float32, float16, bfloat16")
        else:
            floats[name] = tensor
    _check_tensors(folder, config, floats, integers)
    return Eagle3Checkpoint(config, _read_target_ids(folder, config, integers), floats)


def _published_name(stored_name: str) -> str:
    """The name in the authors' files; the speculators library numbers the layer."""
    name = stored_name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _check_tensors(
    folder: Path, config: Eagle3Config, floats: Mapping[str, StoredTensor], integers: Mapping[str, StoredIntegers]
) -> None:
    layer = config.layer
    shapes = config.tensor_shapes()
    if EMBEDDING in floats or layer.hidden_size != config.target_hidden_size:
        shapes[EMBEDDING] = (layer.vocab_size, layer.hidden_size)
    for name, shape in shapes.items():
        tensor = floats.get(name)
        if tensor is None:
            raise damaged(folder, f"tensor {name} is missing")
        if tensor.shape != shape:
            raise damaged(folder, f"tensor {name} has shape {tensor.shape} where {shape} is needed")
    surplus = (floats.keys() - shapes.keys()) | (integers.keys() - {_TO_TARGET, _TO_DRAFT})
    if surplus:
        raise unsupported(folder, f"it has a tensor {shown(min(surplus))} that an EAGLE-3 head does not use")


def _read_target_ids(folder: Path, config: Eagle3Config, integers: Mapping[str, StoredIntegers]) -> _Int32Array | None:
    """Raises ModelCorruptError for a map that is missing, contradicts itself, or leads out of the vocabulary."""
    num_drafted, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    for name, length in ((_TO_TARGET, num_drafted), (_TO_DRAFT, vocab_size)):
        if name in integers and integers[name].shape != (length,):
            raise damaged(folder, f"tensor {name} has shape {integers[name].shape} where {(length,)} is needed")
    if _TO_TARGET not in integers:
        if num_drafted == vocab_size:
            return None
        raise damaged(folder, f"tensor {_TO_TARGET} is missing, the map of {num_drafted} ids to {vocab_size}")
    target_ids = np.arange(num_drafted) + integers[_TO_TARGET].read()
    problem = _problem_of(target_ids, vocab_size, integers)
    if problem:
        raise damaged(folder, problem)
    return target_ids.astype(np.int32)


def _problem_of(target_ids: Int64Array, vocab_size: int, integers: Mapping[str, StoredIntegers]) -> str:
    if target_ids.min() < 0 or target_ids.max() >= vocab_size:
        return f"tensor {_TO_TARGET} leads out of a vocabulary of {vocab_size} tokens"
    is_drafted = np.zeros(vocab_size, dtype=np.bool_)
    is_drafted[target_ids] = True
    if is_drafted.sum() < target_ids.size:
        return f"tensor {_TO_TARGET} leads to a token twice"
    if _TO_DRAFT in integers and not np.array_equal(integers[_TO_DRAFT].read() != 0, is_drafted):
        return f"tensors {_TO_TARGET} and {_TO_DRAFT} contradict each other"
    return ""
