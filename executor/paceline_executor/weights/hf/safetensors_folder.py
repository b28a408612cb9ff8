"""A model out of a Hugging Face folder: config.json and safetensors files, one or several with an index.

Whatever the only one is called, it is the model's: older tools name it after its bits.

The safetensors library checks the headers: every tensor inside its file, no two on the same bytes, none left over.
Refuses to know tokenizers, and how a model computes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from paceline.process.small_files import open_regular
from paceline_executor.errors import ModelNotFoundError, UnsupportedModelError
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_executor.weights.grouped_rows import Matrix
from paceline_executor.weights.hf.config import MAX_LAYERS, read_hf_config
from paceline_executor.weights.hf.expert_tensors import check_experts, experts_apart
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.kv_scales import take_kv_scales
from paceline_executor.weights.hf.quantised.formats import read_format
from paceline_executor.weights.hf.quantised.parts import Part, Parts
from paceline_executor.weights.refusals import damaged, shown, unreadable, unsupported, wrong
from paceline_executor.weights.stored_checkpoint import StoredCheckpoint
from paceline_executor.weights.stored_tensor import FileBytes, FloatType, StoredIntegers, StoredTensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ENDINGS = (".safetensors.index.json", ".safetensors")
# Hidden, the same weights in Mistral's format, what is added to others, and one of several files.
_NOT_ALL = re.compile(r"\.|consolidated|adapter_|.*-\d+-of-0*([2-9]|1\d)")
MAX_INDEX_BYTES = 64 << 20
MAX_HEADER_BYTES = 32 << 20  # the largest models in use need a twentieth of it
MAX_FILES = 1 << 12
_LENGTH_BYTES = 8  # the header's length, little-endian, comes first in a file
_MAX_LISTED = 8
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_DTYPES = {
    "F32": FloatType.FLOAT32,
    "F16": FloatType.FLOAT16,
    "BF16": FloatType.BFLOAT16,
    "F8_E4M3": FloatType.FLOAT8_E4M3FN,
}
_INTEGERS: Mapping[str, np.dtype[np.generic]] = {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),  # exponents
    "BOOL": np.dtype(np.bool_),
}
_MAX_MODULE_WORDS = 7  # "model.layers.0.mlp.experts.0.up_proj"
_VECTORS = ("bias", "e_score_correction_bias")  # no parts of the matrix that they are named after
# So an image model names its text model's tensors; its other tensors are not read.
_TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""}
_IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # older files carry this table and everybody computes it anew


def is_safetensors_folder(folder: Path) -> bool:
    return _weights_file_in(folder) is not None


def weights_file(names: Iterable[str]) -> str | None:
    """Of those in a folder: the index of a model's weights, or the file with them all; None where it is not clear."""
    present = sorted(names)
    known = [name for name in (INDEX_FILE, WEIGHTS_FILE) if name in present]
    if not known and not any(name.endswith(".gguf") for name in present):
        for ending in _ENDINGS:
            found = [name for name in present if name.endswith(ending) and not _NOT_ALL.match(name)]
            known += found if len(found) == 1 else []
    return next(iter(known), None)


def unexplained(names: Iterable[str]) -> str:
    """What to say of the safetensors files of a folder in which it is not clear."""
    found = [shown(name) for name in sorted(names) if name.endswith(_ENDINGS[1])]
    few = ", ".join(found[:_MAX_LISTED]) + (" …" if len(found) > _MAX_LISTED else "")
    return f", and no index says what its {few} hold" if found else ""


def _weights_file_in(folder: Path) -> str | None:
    try:
        return weights_file(path.name for path in folder.iterdir() if path.is_file())
    except OSError:
        return None


def checkpoint_from_folder(folder: Path) -> StoredCheckpoint:
    """Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError, before memory is taken for any weight."""
    config, fields = read_hf_config(folder / CONFIG_FILE), JsonFields.read(folder / CONFIG_FILE)
    read_matrix, drafting_layers = read_format(fields), _drafting_layers(config, fields)
    floats: dict[str, StoredTensor] = {}
    integers: dict[str, StoredIntegers] = {}
    named = (each for name, tensor in read_headers(folder) for each in experts_apart(config, name, tensor))
    for stored_name, tensor in named:
        known_as = None if stored_name.startswith(drafting_layers) else _known_as(stored_name)
        if known_as in floats or known_as in integers:
            raise damaged(tensor.source.path, f"tensor {shown(stored_name)} appears twice")
        if known_as is not None and isinstance(tensor, StoredIntegers):
            integers[known_as] = tensor
        elif known_as is not None and isinstance(tensor, StoredTensor):
            floats[known_as] = tensor
    kv_scales = take_kv_scales(config, floats)
    of_matrices, others = _by_matrix(config, {**floats, **integers})
    matrices = {f"{parts.module}.weight": parts.plain or read_matrix(parts) for parts in of_matrices}
    tensors = matrices | _checked_others(folder, config, others)
    _check_shapes(folder, config, tensors)
    check_experts(folder, config, tensors)
    return StoredCheckpoint(config, tensors, kv_scales)


def _drafting_layers(config: ModelConfig, fields: JsonFields) -> tuple[str, ...]:
    """Behind the last layer GLM's files have those that draft, which are not read."""
    if config.architecture != "glm4moe":
        return ()
    num_layers = fields.whole_number("num_nextn_predict_layers", MAX_LAYERS, 1)
    return tuple(f"model.layers.{config.num_layers + each}." for each in range(num_layers))


def read_headers(folder: Path) -> Iterator[tuple[str, StoredTensor | StoredIntegers]]:
    """The tensors of all files by their names there. Raises as `checkpoint_from_folder` does."""
    names = shard_names(folder)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelNotFoundError(
            f"the download of {folder} is not complete: the index names {len(names)} files, {len(missing)} are "
            f"missing, {missing[0]} the first; fetch it again"
        )
    for name in names:
        yield from _read_header(folder / name)


def shard_names(folder: Path) -> list[str]:
    """Those that the index names, else the only one. Plain names, without folders.

    Raises ModelCorruptError for an index that names anything else.
    """
    path = folder / (_weights_file_in(folder) or WEIGHTS_FILE)
    if path.suffix != ".json":
        return [path.name]
    places = JsonFields.read(path, MAX_INDEX_BYTES).get("weight_map")
    names = set(places.values()) if isinstance(places, dict) and _are_texts(places) else set()
    if not 1 <= len(names) <= MAX_FILES:
        raise damaged(path, "weight_map does not say in which files the tensors are")
    for name in names:
        if _SHARD_NAME.fullmatch(name) is None:
            raise damaged(path, f"it names {shown(name)}, which is not a safetensors file beside it")
    return sorted(names)


def _are_texts(places: dict[object, object]) -> bool:
    return all(isinstance(name, str) for name in places.values())


def _read_header(path: Path) -> Iterator[tuple[str, StoredTensor | StoredIntegers]]:
    """Yields them in the order of their bytes."""
    start = _LENGTH_BYTES + _header_length(path)
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.offset_keys():
                part = file.get_slice(name)
                dtype = part.get_dtype()
                place = (tuple(part.get_shape()), FileBytes(path), start)
                tensor: StoredTensor | StoredIntegers
                if dtype in _DTYPES:
                    tensor = StoredTensor(name, _DTYPES[dtype], *place)
                elif dtype in _INTEGERS:
                    tensor = StoredIntegers(name, _INTEGERS[dtype], *place)
                else:
                    raise _not_read(path, name, dtype)
                # The library has checked that the next tensor begins here.
                start += tensor.num_bytes
                yield name, tensor
    except (SafetensorError, OSError) as error:
        raise damaged(path, f"the safetensors library refuses it ({shown(str(error))})") from error


def _not_read(path: Path, name: str, dtype: str) -> UnsupportedModelError:
    return unsupported(path, f"tensor {shown(name)} is of type {shown(dtype)}; {', '.join(_DTYPES)} are read")


def _header_length(path: Path) -> int:
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    except OSError as error:
        raise unreadable(path, error) from error
    if length > MAX_HEADER_BYTES:
        raise damaged(path, f"it announces a header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed")
    return length


def _known_as(stored_name: str) -> str | None:
    """None for what is not read."""
    if stored_name.startswith(_IMAGE_PREFIXES) or stored_name.endswith(_IGNORED_SUFFIXES):
        return None
    for prefix, instead in _TEXT_PREFIXES.items():
        if stored_name.startswith(prefix):
            return instead + stored_name.removeprefix(prefix)
    return stored_name


def _by_matrix(config: ModelConfig, tensors: Mapping[str, Part]) -> tuple[list[Parts], dict[str, Part]]:
    """The tensors that make up each matrix, and all others."""
    modules = {name.removesuffix(".weight"): shape for name, shape in config.tensor_shapes().items() if len(shape) == 2}
    parts: dict[str, dict[str, Part]] = {}
    others = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        if module not in modules:
            words = name.split(".", _MAX_MODULE_WORDS)
            heads = (".".join(words[:length]) for length in range(1, len(words)))
            module = next((head for head in heads if head in modules), "")
        end = name[len(module) + 1 :]
        if module and end not in _VECTORS:
            parts.setdefault(module, {})[end] = tensor
        else:
            others[name] = tensor
    return [Parts(module, modules[module], found) for module, found in parts.items()], others


def _checked_others(folder: Path, config: ModelConfig, others: Mapping[str, Part]) -> dict[str, StoredTensor]:
    """Raises UnsupportedModelError for those that the model does not use."""
    shapes = config.tensor_shapes()
    used = {}
    for name, tensor in sorted(others.items()):
        if config.tie_word_embeddings and name.startswith("lm_head."):
            if name != "lm_head.weight":  # a tied model's file may hold the output matrix all the same
                raise wrong(
                    folder / CONFIG_FILE, f"it sets tie_word_embeddings, and {shown(name)} is of a matrix apart"
                )
        elif isinstance(tensor, StoredIntegers):
            raise _not_read(tensor.source.path, name, str(tensor.dtype))
        elif name in shapes and tensor.stored is not FloatType.FLOAT8_E4M3FN:
            used[name] = tensor
        elif not (name.endswith(".bias") and _is_zero(tensor)):  # older GPTQ files have one of zeros for each matrix
            raise unsupported(folder, f"it has a tensor {shown(name)} that a {config.architecture} model does not use")
    return used


def _is_zero(tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 1 and not tensor.read().any()


def _check_shapes(folder: Path, config: ModelConfig, tensors: Mapping[str, Matrix]) -> None:
    for name, shape in config.tensor_shapes().items():
        tensor = tensors.get(name)
        if tensor is None:
            raise damaged(folder, f"tensor {name} is missing")
        if tensor.shape != shape:
            raise damaged(folder, f"tensor {name} has shape {tensor.shape} where {shape} is needed")
