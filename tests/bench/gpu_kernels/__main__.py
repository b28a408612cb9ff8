"""`make gpu-kernels`, or `python -m gpu_kernels` with `kernels` and `tests/bench` on the path: test and time on a GPU.

Without a CUDA GPU it says so and ends with 0. Any Python will do that has torch and Triton; nothing is fetched.
"""

import argparse
import sys
import time
from pathlib import Path

from gpu_kernels import config
from gpu_kernels.anchors import MeasurementError, read_anchors
from process_groups import end_with_what_was_started


def main(arguments: list[str] | None = None) -> int:
    """The program's exit code: 0, or 1 if a test or a case failed or could not be measured."""
    options = _parser().parse_args(arguments)
    nothing_ran = config.why_nothing_runs(rehearses=options.rehearse)
    if nothing_ran:
        print(f"gpu-kernels: nothing ran, {nothing_ran}")
        return 0
    try:
        anchors = read_anchors(options.anchors)
    except MeasurementError as error:
        print(f"gpu-kernels: {error}", file=sys.stderr)
        return 2
    if options.rehearse:
        config.interpret_kernels()
    else:
        config.compile_kernels()
    # Only now: these import Triton.
    from gpu_kernels.case import Scale
    from gpu_kernels.run import Run

    words = [word.strip() for word in options.only.split(",") if word.strip()]
    run = Run(anchors, options.json, time.monotonic() + options.seconds, words)
    try:
        if options.rehearse:
            return run.rehearsed()
        return run.on_gpu(Scale.QUICK if options.quick else Scale.FULL, with_tests=not options.no_tests)
    except KeyboardInterrupt:
        print(f"gpu-kernels: interrupted after {len(run.results)} cases", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-kernels", description=__doc__)
    parser.add_argument("--anchors", type=Path, metavar="FOLDER", help="CSV files of measured kernels to compare with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, after every case")
    parser.add_argument("--only", default="", metavar="WORDS", help="operations whose names hold one of these")
    parser.add_argument("--quick", action="store_true", help="only the shapes that targets name")
    parser.add_argument("--no-tests", action="store_true", help="do not run the tests first")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, interpreted on the CPU, nothing timed")
    parser.add_argument("--seconds", type=float, default=440, help="start no case after so many (default 440)")
    return parser


if __name__ == "__main__":
    end_with_what_was_started()
    sys.exit(main())
