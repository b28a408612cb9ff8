"""The environment of the stages: where modules are found, how kernels run, and that nothing is fetched."""

import os
from pathlib import Path

from gpu_kernels.config import environment_with

ROOT = Path(__file__).resolve().parents[3]
_FOLDERS = ("kernels", "executor", "scheduler", "protos", "clients", "tests/bench", "tests/support")


def stage_environment(scripts: Path, site: Path | None) -> dict[str, str]:
    """For a stage and the processes that it starts. scripts: a folder of console scripts; site: of installed wheels."""
    return environment_with(*(ROOT / folder for folder in _FOLDERS), *filter(None, [site])) | {
        "PATH": os.pathsep.join([str(scripts), os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }


def compiling_into(folder: Path) -> dict[str, str]:
    """This process's environment, with compiled kernels kept in a folder of their own: executors have theirs below the
    cache folder, other processes find them there.
    """
    return os.environ | {"PACELINE_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}


def kernels_folder() -> Path:
    """Where executors of this environment keep compiled kernels."""
    from paceline.process.options import default_cache_dir  # the program that starts the stages does not have it

    return default_cache_dir(os.environ)
