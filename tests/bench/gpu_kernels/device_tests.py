"""The kernels' tests on the device: in a process of their own, with what is installed there. Knows pytest.

Where a module that tests import is missing, they are skipped and say so; without pytest itself none can run.
"""

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpu_kernels.config import environment_with

_ROOT = Path(__file__).resolve().parents[3]
_TESTS = _ROOT / "tests" / "kernels" / "triton"
# Compiles every kernel ahead of time, which takes minutes and needs no device.
_LEFT_OUT = "test_triton_resources.py"
_AT_A_TIME = 8  # compiling takes a core each
_GOOD_CODES = (0, 5)  # passed, or skipped as a whole
_MAX_LINES, _MAX_CHARACTERS = 8, 1200


@dataclass(frozen=True, slots=True)
class Ran:
    """How the tests went."""

    is_good: bool
    report: str


def run_tests(folder: Path = _TESTS, *, timeout_s: float) -> Ran:
    """Run the tests of a folder, file beside file, with nothing read from the repository's own settings of pytest."""
    if importlib.util.find_spec("pytest") is None:
        return Ran(True, "tests: pytest is not installed here, so none ran; what is timed is checked all the same")
    files = sorted(file for file in folder.glob("test_*.py") if file.name != _LEFT_OUT)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        ran = list(pool.map(lambda file: _run_file(file, timeout_s), files))
    return Ran(all(one.is_good for one in ran), "\n".join(one.report for one in ran))


def _run_file(file: Path, timeout_s: float) -> Ran:
    options = ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "gpu_kernels.missing_modules", "-q", "-rs"]
    options += ["-c", str(Path(__file__).with_name("pytest.ini")), "--rootdir", str(_ROOT)]
    options += ["--confcutdir", str(file.parent), "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    environment = environment_with(*(_ROOT / folder for folder in ("kernels", "tests/bench", "executor")))
    try:
        ran = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        shown = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return Ran(False, f"{file.name}: not done after {timeout_s:.0f} s\n{_end_of(shown)}")
    return Ran(ran.returncode in _GOOD_CODES, f"{file.name}: {_end_of(ran.stdout + ran.stderr)}")


def _end_of(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_MAX_LINES:])[-_MAX_CHARACTERS:]
