"""The stage of the runner: what comes out is right, whatever runs beside it, and goes on being so.

Knows which checks there are and how large they are. How a check is done is `equality`'s, `invariance`'s and `endurance`'s.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from paceline_executor.testing.models import FAMILY_CONFIGS

from gpu.endurance import goes_on
from gpu.equality import draws_agree, family_agrees, fits_distribution
from gpu.invariance import Variants
from gpu.report import Report
from gpu.rigs import find_place
from gpu.stage import Task, run_stage


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    families: tuple[str, ...]
    num_tokens: int  # of an output that is compared
    num_rows: int  # at most at a time
    num_draws: int  # of one distribution
    num_steps: int  # without growth


FULL = Sizes(tuple(FAMILY_CONFIGS), num_tokens=48, num_rows=64, num_draws=20_000, num_steps=100_000)
TINY = Sizes(("llama", "gemma3"), num_tokens=6, num_rows=4, num_draws=400, num_steps=300)


def work(task: Task, report_on: Callable[[str], Report]) -> Report:
    """Every check there is, the quick ones first."""
    sizes, place = TINY if task.rehearses else FULL, find_place(rehearses=task.rehearses)
    report = report_on(place.name)
    print(f"runner on {place.name}", flush=True)
    for family in sizes.families:
        report.check(f"{family}: greedy tokens are the CPU's", lambda: family_agrees(place, family, sizes.num_tokens))
    report.check("seeded draws are the CPU's", lambda: draws_agree(place, sizes.num_tokens))
    for numbers in place.numerics:
        variants: list[Variants] = []
        report.check(
            f"{numbers}: streams by themselves", lambda: _made(variants, Variants(place, numbers, sizes.num_tokens))
        )
        for name in Variants.NAMES if variants else ():
            report.check(f"{numbers}: the same bits, {name}", lambda: variants[0].compare(name))
    report.check("tokens fit their probabilities", lambda: fits_distribution(place, sizes.num_rows, sizes.num_draws))
    report.check(
        f"{sizes.num_steps:,} steps take no more memory", lambda: goes_on(place, sizes.num_rows, sizes.num_steps)
    )
    return report


def _made(variants: list[Variants], made: Variants) -> str:
    variants.append(made)
    return f"{made.num_values} numbers to be compared"


if __name__ == "__main__":
    sys.exit(run_stage("runner", work))
