"""Opens a model by its path: its weights and its tokenizer.

Knows which kinds of path hold a model. What is in them is known to the readers it calls.
"""

from pathlib import Path

from paceline_executor.weights.checkpoint import Checkpoint
from paceline_executor.weights.gguf_file import open_gguf_checkpoint
from paceline_executor.weights.gguf_header import read_gguf_header
from paceline_executor.weights.refusals import unsupported
from paceline_executor.weights.tokenizer import TokenizerBundle
from paceline_executor.weights.tokenizer_folder import tokenizer_from_folder
from paceline_executor.weights.tokenizer_gguf import tokenizer_from_gguf


def load_checkpoint(path: Path) -> Checkpoint:
    """The weights of the model at `path`, a GGUF file, checked and ready to be read tensor by tensor.

    Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    if path.is_dir():
        raise unsupported(path, "it is a folder, and weights are read from GGUF files only")
    return open_gguf_checkpoint(path)


def load_tokenizer(path: Path) -> TokenizerBundle:
    """The tokenizer of the model at `path`, a GGUF file or a folder with a tokenizer.json.

    Raises ModelNotFoundError, ModelCorruptError or UnsupportedModelError.
    """
    if path.is_dir():
        return tokenizer_from_folder(path)
    return tokenizer_from_gguf(read_gguf_header(path))
