"""The kernels' tests on the device: in processes of their own, with what is installed there. Knows pytest.

Where a module that tests import is missing, they are skipped and say so; without pytest itself none can run.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from gpu_kernels.config import environment_with

_ROOT = Path(__file__).resolve().parents[3]
_TESTS = _ROOT / "tests" / "kernels"
# What only CPUs run, the test of this program, and what compiles every kernel ahead of time, for minutes.
_LEFT_OUT = ("cpu/*", "test_gpu_kernels.py", "test_*resources.py")
_AT_A_TIME = 8  # compiling takes a core each
_GOOD_CODES = (0, 5)  # passed, or skipped as a whole
_MAX_LINES, _MAX_CHARACTERS = 8, 1200


@dataclass(frozen=True, slots=True)
class Ran:
    """How the tests went."""

    is_good: bool
    report: str


def run_tests(folder: Path = _TESTS, *, timeout_s: float) -> Ran:
    """Run the tests below a folder, file beside file, without the repository's own settings of pytest."""
    if importlib.util.find_spec("pytest") is None:
        return Ran(True, "tests: pytest is not installed here, so none ran; what is timed is checked all the same")
    files = sorted(folder.rglob("test_*.py"))
    wanted = [file for file in files if not any(map(file.match, _LEFT_OUT))]
    ran = asyncio.run(_run_files(wanted, folder, timeout_s))
    return Ran(all(one.is_good for one in ran), "\n".join(one.report for one in ran))


async def _run_files(files: list[Path], folder: Path, timeout_s: float) -> list[Ran]:
    slots = asyncio.Semaphore(_AT_A_TIME)
    return list(await asyncio.gather(*(_run_file(file, folder, timeout_s, slots) for file in files)))


async def _run_file(file: Path, folder: Path, timeout_s: float, slots: asyncio.Semaphore) -> Ran:
    options = ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "gpu_kernels.missing_modules", "-q", "-rs"]
    options += ["-c", str(Path(__file__).with_name("pytest.ini")), "--rootdir", str(_ROOT)]
    options += ["--confcutdir", str(folder), "--tb=short"]
    environment = environment_with(
        *(_ROOT / each for each in ("kernels", "protos", "tests/bench", "tests/support", "executor"))
    )
    shown = bytearray()
    async with slots:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pytest", *options, str(file)),
            cwd=_ROOT,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None, "it was asked for"
        try:
            async with asyncio.timeout(timeout_s):
                while part := await process.stdout.read(2**16):
                    shown += part
                code = await process.wait()
        except TimeoutError:
            return Ran(False, f"{file.name}: not done after {timeout_s:.0f} s\n{_end_of(shown)}")
        finally:  # also of a run that is interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
    return Ran(code in _GOOD_CODES, f"{file.name}: {_end_of(shown)}")


def _end_of(shown: bytearray) -> str:
    lines = shown.decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-_MAX_LINES:])[-_MAX_CHARACTERS:]
