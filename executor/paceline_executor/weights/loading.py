"""Opens a model by its path: its weights and its tokenizer.

Knows which kinds of path hold a model. What is in them is known to the readers it calls.
"""

from pathlib import Path

from paceline_executor.weights.checkpoint import Checkpoint
from paceline_executor.weights.gguf_file import open_gguf_checkpoint
from paceline_executor.weights.gguf_header import read_gguf_header
from paceline_executor.weights.refusals import unreadable, unsupported
from paceline_executor.weights.tokenizer import TokenizerBundle
from paceline_executor.weights.tokenizer_folder import tokenizer_from_folder
from paceline_executor.weights.tokenizer_gguf import tokenizer_from_gguf


def load_checkpoint(path: Path) -> Checkpoint:
    """The weights of the model at `path`, a GGUF file or a folder with one, ready to be read tensor by tensor.

    Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    return open_gguf_checkpoint(_gguf_file(path))


def load_tokenizer(path: Path) -> TokenizerBundle:
    """The tokenizer of the model at `path`: of a folder its tokenizer.json, where it has one, else the GGUF file's own.

    Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    if (path / "tokenizer.json").is_file():
        return tokenizer_from_folder(path)
    return tokenizer_from_gguf(read_gguf_header(_gguf_file(path)))


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
