"""Which lines of the executor's link and rows the simulation executes: nearly all of those that act on plans."""

import sys
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType

import pytest

import paceline_executor
from simulation.run import run_seed

ROOT = Path(paceline_executor.__file__).parent
# All of rows, and of link what holds no gRPC call, no profile and no metric, but for the thread that steps run on.
LINK = (
    "description",
    "engine",
    "failure_attribution",
    "fence",
    "plan_stream",
    "plan_streams",
    "result_batcher",
    "step_loop",
)
FILES = [*(ROOT / "link" / f"{name}.py" for name in LINK), *(ROOT / "rows").glob("[!_]*.py")]


def lines_of_functions(code):
    """Those that do something: what an import executes shows nothing."""
    lines = set()
    if code.co_flags & CO_OPTIMIZED:
        lines = {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}
    return lines.union(*(lines_of_functions(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


@contextmanager
def traced():
    """The lines of `FILES`, by file, that are executed meanwhile; everything takes some times as long."""
    executed = {str(path): set() for path in FILES}

    def enter(frame, event, argument):
        return step if frame.f_code.co_filename in executed else None

    def step(frame, event, argument):
        if event == "line":
            executed[frame.f_code.co_filename].add(frame.f_lineno)
        return step

    sys.settrace(enter)
    try:
        yield executed
    finally:
        sys.settrace(None)


@pytest.mark.slow
def test_the_simulation_executes_what_executors_do_with_plans():
    """By 150 seeds. The tenth that is left refuses what no simulated scheduler sends, or names errors of a device."""
    lines = {str(path): lines_of_functions(compile(path.read_text(), str(path), "exec")) for path in FILES}
    with traced() as executed:
        for seed in range(150):
            outcome, _ = run_seed(seed)
            assert not outcome.failures
    missed = {path: sorted(lines[path] - executed[path]) for path in lines}
    assert sum(map(len, missed.values())) <= 0.1 * sum(map(len, lines.values())), missed
