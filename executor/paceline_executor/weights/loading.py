"""Opens a model by its path: a GGUF file, a folder with one, a Hugging Face folder with safetensors files."""

from collections.abc import Callable
from pathlib import Path

from paceline_executor.errors import UnsupportedModelError
from paceline_executor.weights.checkpoint import Checkpoint
from paceline_executor.weights.dummy import dummy_checkpoint
from paceline_executor.weights.gguf.file import checkpoint_from_gguf
from paceline_executor.weights.gguf.header import MAGIC, GgufHeader, read_gguf_header
from paceline_executor.weights.gguf.tokenizer import tokenizer_from_gguf
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.hf.safetensors_folder import checkpoint_from_folder, is_safetensors_folder, unexplained
from paceline_executor.weights.hf.tokenizer import tokenizer_from_folder
from paceline_executor.weights.refusals import CONVERT, UNSAFE_SUFFIXES, begins_with, shown, unreadable, unsupported
from paceline_executor.weights.tokenizer import TokenizerBundle

ADAPTER_FILE = "adapter_config.json"

Accept = Callable[[Checkpoint], None]


def load_model(path: Path, accept: Accept = lambda _: None) -> tuple[Checkpoint, TokenizerBundle]:
    """A GGUF file is parsed once. accept: called before the tokenizer is read, which takes longer than all else.

    Raises what `accept` does, ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    if is_safetensors_folder(path):
        folder = checkpoint_from_folder(path)
        accept(folder)
        return folder, tokenizer_from_folder(path, folder.config.vocab_size)
    header = _gguf_header(path)
    checkpoint = checkpoint_from_gguf(header)
    accept(checkpoint)
    if _has_own_tokenizer(path):
        return checkpoint, tokenizer_from_folder(path, checkpoint.config.vocab_size)
    return checkpoint, tokenizer_from_gguf(header)


def load_dummy(folder: Path, accept: Accept = lambda _: None) -> tuple[Checkpoint, TokenizerBundle | None]:
    """Random weights of the shape that the folder's config.json says. accept: as of `load_model`.

    Raises what `accept` does, ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    checkpoint = dummy_checkpoint(folder)
    accept(checkpoint)
    tokenizer = tokenizer_from_folder(folder, checkpoint.config.vocab_size) if _has_own_tokenizer(folder) else None
    return checkpoint, tokenizer


def load_checkpoint(path: Path) -> Checkpoint:
    """It is read tensor by tensor.

    Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    return checkpoint_from_folder(path) if is_safetensors_folder(path) else checkpoint_from_gguf(_gguf_header(path))


def load_tokenizer(path: Path) -> TokenizerBundle:
    """Of a folder its tokenizer.json, else the GGUF file's own.

    Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    if _has_own_tokenizer(path) or is_safetensors_folder(path):
        return tokenizer_from_folder(path)
    return tokenizer_from_gguf(_gguf_header(path))


def _has_own_tokenizer(path: Path) -> bool:
    return (path / "tokenizer.json").exists()


def _gguf_header(path: Path) -> GgufHeader:
    return read_gguf_header(_gguf_file(path))


def _gguf_file(path: Path) -> Path:
    if not path.is_dir():
        if begins_with(path, MAGIC):
            return path
        if path.suffix in (".safetensors", ".json"):
            raise unsupported(path, "it is a part of a model; give the path of the folder that it is in")
        if path.suffix in UNSAFE_SUFFIXES:
            raise _convert(path)
        return path
    try:
        files = sorted(path.iterdir())
    except OSError as error:
        raise unreadable(path, error) from error
    gguf = [file for file in files if file.suffix == ".gguf" or begins_with(file, MAGIC)]
    if len(gguf) == 1:
        return gguf[0]
    if gguf:
        raise unsupported(path, f"it has {len(gguf)} GGUF files, {gguf[0].name} the first; give the path of one")
    if path / ADAPTER_FILE in files:
        base = shown(str(JsonFields.read(path / ADAPTER_FILE).get("base_model_name_or_path")))
        raise UnsupportedModelError(f"{path} is an adapter of {base}: adapters are not served; merge it into its model")
    unsafe = next((file for file in files if file.suffix in UNSAFE_SUFFIXES), None)
    if unsafe is not None:
        raise _convert(unsafe)
    files_are = unexplained(file.name for file in files if file.is_file())
    raise unsupported(path, f"it is a folder with neither a model.safetensors nor a GGUF file{files_are}")


def _convert(path: Path) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} is not read, because such a file can run code when it is loaded: where its authors are trusted, "
        f"convert the model to safetensors: {CONVERT}"
    )
