"""Opens a model by its path: its weights and its tokenizer.

Knows which kinds of path hold a model. What is in them is known to the readers it calls.
"""

from pathlib import Path

from paceline_executor.weights.checkpoint import Checkpoint
from paceline_executor.weights.gguf_file import checkpoint_from_gguf
from paceline_executor.weights.gguf_header import GgufHeader, read_gguf_header
from paceline_executor.weights.refusals import unreadable, unsupported
from paceline_executor.weights.tokenizer import TokenizerBundle
from paceline_executor.weights.tokenizer_folder import tokenizer_from_folder
from paceline_executor.weights.tokenizer_gguf import tokenizer_from_gguf


def load_model(path: Path) -> tuple[Checkpoint, TokenizerBundle]:
    """Weights and tokenizer of the model at `path`, as the two functions below say; the GGUF file is parsed once.

    Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    header = _gguf_header(path)
    checkpoint = checkpoint_from_gguf(header)
    return checkpoint, tokenizer_from_folder(path) if _has_own_tokenizer(path) else tokenizer_from_gguf(header)


def load_checkpoint(path: Path) -> Checkpoint:
    """The weights of the model at `path`, a GGUF file or a folder with one, ready to be read tensor by tensor.

    Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    return checkpoint_from_gguf(_gguf_header(path))


def load_tokenizer(path: Path) -> TokenizerBundle:
    """The tokenizer of the model at `path`: of a folder its tokenizer.json, where it has one, else the GGUF file's own.

    Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    return tokenizer_from_folder(path) if _has_own_tokenizer(path) else tokenizer_from_gguf(_gguf_header(path))


def _has_own_tokenizer(path: Path) -> bool:
    return (path / "tokenizer.json").is_file()


def _gguf_header(path: Path) -> GgufHeader:
    return read_gguf_header(_gguf_file(path))


def _gguf_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    try:
        files = sorted(path.glob("*.gguf"))
    except OSError as error:
        raise unreadable(path, error) from error
    if not files:
        raise unsupported(path, "it is a folder without a GGUF file, and weights are read from such a file only")
    if len(files) > 1:
        raise unsupported(path, f"it has {len(files)} GGUF files, {files[0].name} the first; give the path of one")
    return files[0]
