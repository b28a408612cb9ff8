"""Installs the peers, each into an environment of its own, once; and finds the model that all of them run."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paceline.process.options import default_cache_dir
from paceline_executor.errors import ExecutorError
from paceline_executor.weights import DEFAULT_MODEL, resolve_model
from process_groups import run_program
from side_by_side.engines import Environment
from side_by_side.errors import InstallError

_STAMP = "installed.txt"


def install(environment: Environment, say: Callable[[str], None]) -> None:
    """Make the environment, unless it holds just this already. `InstallError` says what pip said last."""
    stamp = environment.folder / _STAMP
    variables = map("=".join, environment.variables.items())
    contents = "\n".join((*environment.requirements, *environment.options, *environment.unwanted, *variables))
    if stamp.exists() and stamp.read_text(encoding="utf-8") == contents:
        return
    say(f"installing {', '.join(environment.requirements)}, once: {environment.takes}")
    begun_s = time.monotonic()
    shutil.rmtree(environment.folder, ignore_errors=True)
    log = environment.folder.with_name(f"{environment.folder.name}.log")
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment.folder)], environment, log)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment.python]
    _run([*pip, "install", *environment.options, *environment.requirements], environment, log)
    if environment.unwanted:
        _run([*pip, "uninstall", "--yes", *environment.unwanted], environment, log)
    stamp.write_text(contents, encoding="utf-8")
    say(f"installed in {time.monotonic() - begun_s:.0f} s")


def model_file() -> Path:
    """The default model's GGUF file, fetched when it is not there yet. `InstallError` when it cannot be had."""
    try:
        path = resolve_model(DEFAULT_MODEL, cache_dir=default_cache_dir(os.environ), on_progress=lambda _: None)
    except ExecutorError as error:
        raise InstallError(str(error)) from error
    return path if path.is_file() else next(path.glob("*.gguf"))


def _run(command: list[str], environment: Environment, log: Path) -> None:
    with log.open("ab") as output:
        finished = run_program(
            command, {**os.environ, **environment.variables}, stdout=output, stderr=subprocess.STDOUT
        )
    if finished.code != 0:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise InstallError(f"not installed: {errors[-1].strip()[:300]}, see {log}")
