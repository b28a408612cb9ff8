"""Runs the programs that the checks consist of, from the environment that runs the checks.

Apart, because all checks that run a program share it.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from repository_checks.sources import ROOT

BIN = Path(sys.executable).parent


def run(
    program: str,
    *arguments: str | Path,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program of this environment to its end; both its streams are in `stdout`, in the order written."""
    return subprocess.run(
        [str(BIN / program), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        input=stdin,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
