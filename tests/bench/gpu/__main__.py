"""`make gpu`: the stages one after the other, each a process with a time limit, on a machine with a CUDA GPU.

The machine may be bare: Python, torch, Triton and numpy, no registry, no network. What else is missing comes as wheels
out of a folder. Without a GPU it says so and ends with 0.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.config import ROOT, stage_environment
from gpu.errors import GpuRunError
from gpu.peer import read_peer
from gpu.stages import NEEDED, Asked, Stage, command_of
from gpu.wheels import install_wheels, missing_modules
from process_groups import end_with_what_was_started, run_program

_MODULES = ("torch", "triton", "numpy")
_LIMIT_S = 480.0
_SCRIPTS = {"paceline-scheduler": "paceline_scheduler", "paceline-executor": "paceline_executor"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The program's exit code: 0 if all stages passed, 1 if one did not, 2 for a file that is not what it should be."""
    options = _parser().parse_args(arguments)
    nothing_ran = _why_nothing_runs(rehearses=options.rehearse)
    if nothing_ran:
        print(f"gpu: nothing ran, {nothing_ran}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.out.resolve()
    asked = Asked(
        folder, options.seconds, options.rehearse, options.model, options.peer, options.anchors, options.numbers
    )
    try:
        read_peer(asked.peer)  # what is wrong with it is told before anything runs
        with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as scratch:
            return _run(options.stages, asked, options.wheels, Path(scratch))
    except GpuRunError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gpu: interrupted, what was found is in {folder}", file=sys.stderr)
        return 1


def _why_nothing_runs(*, rehearses: bool) -> str:
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {' and no '.join(missing)}"
    import torch

    if rehearses or torch.cuda.is_available():
        return ""
    return f"torch {torch.__version__} finds no CUDA device here"


def _run(stages: Sequence[Stage], asked: Asked, wheels: Path | None, scratch: Path) -> int:
    site = scratch / "site" if wheels is not None else None
    if wheels is not None and site is not None:
        install_wheels(wheels, site)
    environment = stage_environment(_write_scripts(scratch / "bin"), site)
    outcomes = {}
    for stage in sorted(set(stages), key=list(Stage).index):
        print(f"== {stage.value}", flush=True)
        file = asked.folder / f"{stage.value}.json"
        file.unlink(missing_ok=True)  # of an earlier run
        outcomes[stage] = _outcome(stage, asked, environment, file)
    print("== outcome", flush=True)
    for stage, outcome in outcomes.items():
        print(f"{stage.value:<8} {outcome}", flush=True)
    print(f"figures and logs are in {asked.folder}", flush=True)
    return 0 if all(outcome.startswith("passed after") for outcome in outcomes.values()) else 1


def _outcome(stage: Stage, asked: Asked, environment: dict[str, str], file: Path) -> str:
    """Run a stage, and add to its file how it ended."""
    missing = missing_modules(NEEDED[stage], environment)
    if missing:
        outcome = f"did not run: this Python has no {', '.join(missing)}; put their wheels into the folder of WHEELS="
        return _told(file, outcome)
    begun = time.monotonic()
    code = run_program(command_of(stage, asked), environment, limit_s=asked.seconds).code
    seconds = time.monotonic() - begun
    if code is None:
        return _told(file, f"was ended after {seconds:.0f} s")
    left_out = len(_found(file).get("left_out", []))
    if code == 1 and left_out and _found(file)["is_good"]:
        return _told(file, f"passed, but {left_out} could not be measured, after {seconds:.0f} s")
    return _told(file, f"{'passed' if code == 0 else f'failed with code {code}'} after {seconds:.0f} s")


def _found(file: Path) -> dict[str, Any]:
    """What a stage has written: one that was ended, nothing or the half of it."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return {"is_good": False}


def _told(file: Path, outcome: str) -> str:
    file.write_text(json.dumps({**_found(file), "outcome": outcome}, indent=1) + "\n", encoding="utf-8")
    return outcome


def _write_scripts(folder: Path) -> Path:
    """Console scripts of the services, which nobody has installed here."""
    folder.mkdir()
    for name, module in _SCRIPTS.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__)
    names = [stage.value for stage in Stage]
    parser.add_argument("--stages", type=_stages, default=list(Stage), metavar="NAMES", help=f"of {','.join(names)}")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of what this Python has not")
    parser.add_argument("--peer", type=Path, metavar="FILE", help="CSV of another engine's figures on this GPU")
    parser.add_argument("--anchors", type=Path, metavar="FOLDER", help="CSV files of measured kernels to compare with")
    parser.add_argument("--model", metavar="PATH", help="a real small model for e2e; without it weights are random")
    parser.add_argument("--numbers", choices=["bf16", "fp8"], help="the only type that drafts and bench time")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "gpu", metavar="FOLDER", help="results and logs")
    parser.add_argument("--seconds", type=float, default=_LIMIT_S, help=f"a stage takes at most (default {_LIMIT_S:g})")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU; times mean nothing")
    return parser


def _stages(text: str) -> list[Stage]:
    known = {stage.value: stage for stage in Stage}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"there is no stage {', '.join(unknown)!r}; there are {', '.join(known)}")
    return [known[name] for name in names]


if __name__ == "__main__":
    end_with_what_was_started()
    sys.exit(main())
