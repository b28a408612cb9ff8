"""The kernels' tests on the device: in a process of their own, with what is installed there. Knows pytest.

Where a module that tests import is missing, they are skipped and say so; without pytest itself none can run.
"""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gpu_kernels.config import environment_with

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = _ROOT / "tests" / "kernels" / "triton"
# Compiles every kernel ahead of time, which takes minutes and needs no device.
_LEFT_OUT = "test_triton_resources.py"
_MAX_LINES, _MAX_CHARACTERS = 20, 2000


@dataclass(frozen=True, slots=True)
class Ran:
    """How the tests went."""

    is_good: bool
    report: str


def run_tests(folder: Path = _TESTS, *, timeout_s: float) -> Ran:
    """Run the tests of a folder, with nothing read from the repository's own settings of pytest."""
    if importlib.util.find_spec("pytest") is None:
        return Ran(True, "tests: pytest is not installed here, so none ran; what is timed is checked all the same")
    options = ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "gpu_kernels.missing_modules", "-q", "-rs"]
    options += ["-c", str(Path(__file__).with_name("pytest.ini")), "--rootdir", str(_ROOT)]
    options += ["--confcutdir", str(folder), "--ignore", str(folder / _LEFT_OUT), "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    environment = environment_with(*(_ROOT / folder for folder in ("kernels", "tools", "executor")))
    try:
        ran = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Ran(False, f"tests: not done after {timeout_s:.0f} s")
    lines = (ran.stdout + ran.stderr).strip().splitlines()[-_MAX_LINES:]
    return Ran(ran.returncode == 0, "\n".join(lines)[-_MAX_CHARACTERS:])
