"""How a model's files are refused: one line each, whatever the files contain.

Knows no format of a model. Apart, because the readers of all formats word their errors so.
"""

from pathlib import Path

from paceline.process.small_files import open_regular
from paceline_executor.errors import ModelCorruptError, ModelNotFoundError, UnsupportedModelError

MAX_SHOWN_CHARS = 80
UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Python's pickle format runs what it contains when it is loaded."""


_LFS_POINTER = b"version https://git-lfs."
_IN_ITS_FOLDER = (
    'in its folder, python -c \'from transformers import {} as A; A.from_pretrained(".").save_pretrained(".")\''
)
CONVERT = _IN_ITS_FOLDER.format("AutoModelForCausalLM")
"""What makes safetensors of a pickle."""
MAKE_TOKENIZER = _IN_ITS_FOLDER.format("AutoTokenizer")


def begins_with(path: Path, magic: bytes) -> bool:
    """Not if it is no file that can be read."""
    try:
        with open_regular(path) as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


def shown(text: str) -> str:
    """Quoted, escaped and cut short, so that it can stand in a one-line message.

    It is cut in the middle: of a path the end says most.
    """
    half = MAX_SHOWN_CHARS // 2
    return repr(text if len(text) <= MAX_SHOWN_CHARS else f"{text[:half]}…{text[-half:]}")


def damaged(path: Path, reason: str) -> ModelCorruptError:
    """Files contradict themselves or their format, or git has not brought them."""
    if begins_with(path, _LFS_POINTER):
        return ModelCorruptError(f"{path} is a git-lfs pointer, not the file itself: run git lfs pull in its folder")
    return ModelCorruptError(f"{path} is damaged: {reason}; fetch it again or choose another model")


def wrong(path: Path, reason: str) -> ModelCorruptError:
    """A file is whole, and says what cannot be."""
    return ModelCorruptError(f"{path} cannot be used: {reason}; correct the file or choose another model")


def unsupported(path: Path, feature: str) -> UnsupportedModelError:
    """Sound files need what this version does not have."""
    return UnsupportedModelError(f"{path} cannot be served by this version: {feature}; choose another model")


def unreadable(path: Path, error: OSError) -> ModelNotFoundError:
    return ModelNotFoundError(f"cannot read {path}: {error.strerror or error}; check the path and its permissions")
