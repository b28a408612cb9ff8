"""Wheels from a folder into another one, where Python finds them; nothing is fetched. Knows pip's command line only.

Apart from the driver, so that a missing wheel is told in a sentence before a stage begins.
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpu.errors import GpuRunError
from process_groups import run_program


def install_wheels(folder: Path, site: Path) -> None:
    """All wheels of the folder into `site`, as they are. Raises GpuRunError."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise GpuRunError(f"{folder} has no wheels: name a folder with *.whl files, or leave WHEELS= out")
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), *map(str, wheels)]
    done = run_program(command, stderr=subprocess.PIPE)
    if done.code:
        last = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        raise GpuRunError(f"the wheels of {folder} cannot be installed: {last}")


def missing_modules(modules: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Which of these a process with this environment would not find."""
    names = list(modules)
    looking = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
    command = [sys.executable, "-c", looking, *names]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=True)
    return done.stdout.split()
