"""Fuzz one parser, or all of them: `python -m fuzzing gguf --seconds 600`, with `tests/support` on the path.

Coverage of our own code guides the search (atheris, which is libFuzzer). What breaks a parser is kept under
`tests/fuzz/finds/`, for the tests, and the program ends with 1.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

FINDS = Path(__file__).resolve().parents[2] / "fuzz" / "finds"
MAX_INPUT_BYTES = 1 << 16
MAX_INPUT_S = 20
MAX_RSS_MB = 2048
OURS = ("paceline", "paceline_scheduler", "paceline_executor", "paceline_client", "paceline_cli")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__)
    parser.add_argument("targets", nargs="*", help="names of targets; none: all of them, one after another")
    parser.add_argument("--seconds", type=int, default=600, help="for each target [default: 600]")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_process:
        fuzz(options.targets[0], options.seconds)
    from fuzzing.targets import TARGETS

    wrong = [name for name in options.targets if name not in TARGETS]
    if wrong:
        parser.error(f"there is no target {wrong[0]!r}; there are {', '.join(TARGETS)}")
    return max(run_apart(name, options.seconds) for name in options.targets or TARGETS)


def run_apart(name: str, seconds: int) -> int:
    """Fuzz a target in a process of its own, and print a line about it; returns its exit code."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "fuzzing", name, "--seconds", str(seconds), "--in-process"]
    with tempfile.TemporaryFile() as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
        output.seek(0)
        lines = output.read().decode("utf-8", "replace").splitlines()
    stats = {
        key.removeprefix("stat::").rstrip(":"): int(value)
        for key, value in (line.split()[:2] for line in lines if line.startswith("stat::"))
    }
    told = {
        "target": name,
        "seconds": round(time.monotonic() - begun),
        "executions": stats.get("number_of_executed_units", 0),
        "new_inputs": stats.get("new_units_added", 0),
        "peak_rss_mb": stats.get("peak_rss_mb", 0),
        "exit_code": code,
    }
    print(json.dumps(told), flush=True)
    with contextlib.suppress(OSError):
        (FINDS / name).rmdir()  # nothing was found
    if code:
        print("\n".join(lines[-60:]), file=sys.stderr)
    return 1 if code else 0


def fuzz(name: str, seconds: int) -> None:
    """Fuzz a target in this process, and end it."""
    import atheris

    with atheris.instrument_imports(include=list(OURS), enable_loader_override=False):
        from fuzzing.targets import TARGETS
    target = TARGETS[name]
    finds = FINDS / name
    finds.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paceline-corpus-") as corpus:
        for number, seed in enumerate((*target.seeds(), *(path.read_bytes() for path in sorted(finds.iterdir())))):
            (Path(corpus) / f"seed-{number}").write_bytes(seed)
        options = [
            f"-max_total_time={seconds}",
            f"-max_len={MAX_INPUT_BYTES}",
            f"-timeout={MAX_INPUT_S}",
            f"-rss_limit_mb={MAX_RSS_MB}",
            f"-artifact_prefix={finds}/",
            "-print_final_stats=1",
            "-verbosity=1",
        ]
        atheris.Setup([sys.argv[0], *options, corpus], target.run)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
