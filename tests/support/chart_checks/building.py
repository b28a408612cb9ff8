"""Does what a Dockerfile says without a container runtime: COPY and RUN in a folder, its program as process 1.

Knows what stands in for a registry: the packages of the environment that runs the tests. Lines that need packages of
the operating system (`apt-get`) are left out.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from chart_checks.dockerfile import Image
from repository_checks.programs import BIN
from repository_checks.sources import ROOT

_PREFIX = "/opt/paceline"
_LIBRARIES = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
# Only what the repository itself installs is built and installed; what it needs is found where the tests find it.
_PIP = dict.fromkeys(("PIP_NO_INDEX", "PIP_NO_DEPS", "PIP_IGNORE_INSTALLED", "PIP_DISABLE_PIP_VERSION_CHECK"), "1")
# pip reads this one the other way round.
_PIP["PIP_NO_BUILD_ISOLATION"] = "0"

# All but the volumes becomes read-only; the program is process 1 then.
_CONFINED = """
for volume in "$1" "$2"; do mount --bind "$volume" "$volume"; done
mount -o remount,bind,ro /
shift 2
exec "$@"
"""
_UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")


def build(image: Image, folder: Path) -> Path:
    """Run the lines of the build stage in `folder`; returns where the image's /opt/paceline is then."""
    sources = folder / "src"
    sources.mkdir(parents=True)
    for name in image.copied:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, sources)
    prefix = folder / "paceline"
    variables = {"PATH": f"{BIN}:{os.defpath}", "PYTHONPATH": _LIBRARIES, **_PIP}
    variables |= dict(rest.split("=", 1) for rest in image.all_of("ARG"))
    for line in image.all_of("RUN"):
        if "apt-get" not in line:
            script = line.replace(_PREFIX, str(prefix))
            subprocess.run(["/bin/sh", "-euc", script], cwd=sources, env=variables, check=True)
    return prefix


def in_prefix(words: list[str], prefix: Path) -> list[str]:
    """A command of the image, where its /opt/paceline is elsewhere."""
    return [word.replace(_PREFIX, str(prefix)) for word in words]


def variables_of(image: Image, prefix: Path, cache: Path, scratch: Path) -> dict[str, str]:
    """The image's environment, with its writable folders elsewhere."""
    found = {"PYTHONPATH": _LIBRARIES}
    for name, value in image.environment.items():
        moved = value.replace(_PREFIX, str(prefix)).replace("/var/cache/paceline", str(cache))
        found[name] = str(scratch) if value == "/tmp" else moved  # noqa: S108 - the image's, not this machine's
    return found


def can_confine() -> bool:
    return subprocess.run([*_UNSHARE, "true"], check=False, capture_output=True).returncode == 0


def confined(cache: Path, scratch: Path, *command: str) -> list[str]:
    """A command that runs another as process 1, on a root file system that is read-only but for two folders."""
    return [*_UNSHARE, "sh", "-euc", _CONFINED, "sh", str(cache), str(scratch), *command]


def process_1(unshare: int) -> int:
    """The number outside of the process that is number 1 inside."""
    return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text(encoding="ascii").split()[0])
