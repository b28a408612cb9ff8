"""The environment of this process and of those it starts: how kernels run, which Triton reads when it is imported, and
where modules are found.
"""

import os
from pathlib import Path

_INTERPRET = "TRITON_INTERPRET"


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
