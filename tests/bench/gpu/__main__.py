"""`make gpu`: the stages one after the other, each a process with a time limit, on a machine with a CUDA GPU.

The machine may be bare: Python, torch, Triton and numpy, no registry, no network. What else is missing comes as wheels
out of a folder. Without a GPU it says so and ends with 0.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.bars import read_peer
from gpu.config import ROOT, stage_environment
from gpu.errors import GpuRunError
from gpu.stage import NEEDED, Stage, Task, add_options
from gpu.wheels import install_wheels, missing_modules
from gpu_kernels.config import why_nothing_runs
from process_groups import end_with_what_was_started, run_program

_LIMIT_S = 480.0
_SPARE_S = 30.0  # of its limit, in which a stage ends by itself
_SCRIPTS = {"paceline-scheduler": "paceline_scheduler", "paceline-executor": "paceline_executor"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The program's exit code: 0 if all stages passed, 1 if one did not, 2 for a file that is not what it should be."""
    options = _parser().parse_args(arguments)
    nothing_ran = why_nothing_runs(rehearses=options.rehearse)
    if nothing_ran:
        print(f"gpu: nothing ran, {nothing_ran}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    try:
        read_peer(options.peer)  # what is wrong with it is told before anything runs
        with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as scratch:
            return _run(options, Path(scratch))
    except GpuRunError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gpu: interrupted, what was found is in {options.out}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, scratch: Path) -> int:
    site = None
    if options.wheels is not None:
        site = scratch / "site"
        install_wheels(options.wheels, site)
    environment = stage_environment(_write_scripts(scratch / "bin"), site)
    outcomes = {}
    for stage in sorted(set(options.stages), key=list(Stage).index):
        print(f"== {stage.value}", flush=True)
        file = options.out / f"{stage.value}.json"
        file.unlink(missing_ok=True)  # of an earlier run
        outcomes[stage] = _outcome(stage, options, environment, file)
        found = {**_found(file), "outcome": outcomes[stage]}
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("== outcome", flush=True)
    for stage, outcome in outcomes.items():
        print(f"{stage.value:<8} {outcome}", flush=True)
    print(f"figures and logs are in {options.out}", flush=True)
    return 0 if all(outcome.startswith("passed after") for outcome in outcomes.values()) else 1


def _outcome(stage: Stage, options: argparse.Namespace, environment: dict[str, str], file: Path) -> str:
    """Run a stage; says how it ended."""
    missing = missing_modules(NEEDED[stage], environment)
    if missing:
        return f"did not run: this Python has no {', '.join(missing)}; put their wheels into the folder of WHEELS="
    begun = time.monotonic()
    code = run_program(_command_of(stage, options), environment, limit_s=options.seconds).code
    seconds = time.monotonic() - begun
    if code is None:
        return f"was ended after {seconds:.0f} s"
    found = _found(file)
    if code == 1 and found["is_good"] and found.get("left_out"):
        return f"passed, but {len(found['left_out'])} could not be measured, after {seconds:.0f} s"
    return f"{'passed' if code == 0 else f'failed with code {code}'} after {seconds:.0f} s"


def _command_of(stage: Stage, options: argparse.Namespace) -> list[str]:
    task = Task.of(options, _SPARE_S)
    if stage is not Stage.KERNELS:
        return [sys.executable, "-m", f"gpu.{stage.value}_stage", *task.options()]
    command = [sys.executable, "-m", "gpu_kernels", "--json", str(task.folder / "kernels.json")]
    command += ["--rehearse"] if task.rehearses else ["--seconds", str(task.seconds_left())]
    return command + (["--anchors", str(options.anchors)] if options.anchors else [])


def _found(file: Path) -> dict[str, Any]:
    """What a stage has written: one that was ended, nothing or the half of it."""
    try:
        return {"is_good": False, **json.loads(file.read_text(encoding="utf-8"))}
    except (FileNotFoundError, ValueError):
        return {"is_good": False}


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
    names = ",".join(stage.value for stage in Stage)
    parser.add_argument("--stages", type=_stages, default=list(Stage), metavar="NAMES", help=f"of {names}")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of what this Python has not")
    parser.add_argument("--anchors", type=Path, metavar="FOLDER", help="CSV files of measured kernels to compare with")
    add_options(parser, _LIMIT_S, ROOT / "dist" / "gpu")
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
