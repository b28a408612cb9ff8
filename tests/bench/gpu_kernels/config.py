"""The environment of this process and of those it starts: how kernels run, which Triton reads when it is imported, and
where modules are found, if they are.
"""

import importlib.util
import os
import sys
from pathlib import Path

_INTERPRET = "TRITON_INTERPRET"
_MODULES = ("torch", "triton", "numpy")


def why_nothing_runs(*, rehearses: bool) -> str:
    """Empty where there is a GPU, or none is needed."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {' and no '.join(missing)}"
    import torch

    if rehearses or torch.cuda.is_available():
        return ""
    return f"torch {torch.__version__} finds no CUDA device here"


def interpret_kernels() -> None:
    """Kernels run on the CPU, line by line, in this process and those that it starts."""
    os.environ[_INTERPRET] = "1"


def compile_kernels() -> None:
    """Kernels run on the GPU, in this process and those that it starts."""
    os.environ[_INTERPRET] = "0"


def environment_with(*folders: Path) -> dict[str, str]:
    """For a process that imports modules from these folders, too."""
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
