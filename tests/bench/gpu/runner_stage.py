"""The stage of the runner: what comes out is right, whatever runs beside it, and goes on being so.

Knows which checks there are and how large they are. `equality`, `invariance` and `endurance` know how they are done.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gpu.endurance import goes_on
from gpu.equality import GREEDY_ALONE, GREEDY_AND_SEEDED, SEEDED, agrees
from gpu.invariance import Variants
from gpu.report import Report
from gpu.rigs import Place, find_place
from gpu.stage import Task, run_stage
from random_models import FAMILY_CONFIGS, MIXTURE_CONFIGS, TINY_CONFIG

_MAX_DRAFTS = 7


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    families: tuple[str, ...]
    num_tokens: int  # of an output that is compared
    num_lasting: int  # rows of the many steps
    num_steps: int  # without growth


_CONFIGS = FAMILY_CONFIGS | MIXTURE_CONFIGS
FULL = Sizes(tuple(_CONFIGS), num_tokens=48, num_lasting=16, num_steps=100_000)
TINY = Sizes(("llama", "gemma3", "glm4moe"), num_tokens=6, num_lasting=4, num_steps=300)


def work(task: Task, report_on: Callable[[str], Report]) -> Report:
    """Every check there is, the quick ones first."""
    sizes, place = TINY if task.rehearses else FULL, find_place(rehearses=task.rehearses)
    report = report_on(place.name)
    print(f"runner on {place.name}", flush=True)
    compared = partial(agrees, place, num_tokens=sizes.num_tokens)
    for family in sizes.families:
        check = partial(compared, _CONFIGS[family], GREEDY_ALONE)
        report.check(f"{family}: greedy tokens are the CPU's", check)
    report.check("seeded draws are the CPU's", partial(compared, TINY_CONFIG, SEEDED))
    for name, config in (("tokens", TINY_CONFIG), ("a mixture's tokens", MIXTURE_CONFIGS["qwen3moe"])):
        drafted = partial(compared, config, GREEDY_AND_SEEDED, max_drafts=_MAX_DRAFTS)
        report.check(f"{name} with drafts are the CPU's", drafted)
    for numbers in place.numerics:
        _check_variants(report, place, numbers, sizes.num_tokens)
    endures = f"{sizes.num_steps:,} steps take no more memory"
    report.check(endures, partial(goes_on, place, sizes.num_lasting, sizes.num_steps))
    return report


def _check_variants(report: Report, place: Place, numbers: str, num_tokens: int) -> None:
    made: list[Variants] = []

    def one_by_one() -> str:
        made.append(Variants(place, numbers, num_tokens))
        return f"{made[0].num_values} tokens and log-probabilities to be compared"

    report.check(f"{numbers}: streams one by one", one_by_one)
    for variants in made:
        for name in variants.ways:
            report.check(f"{numbers}: the same bits, {name}", partial(variants.compare, name))


if __name__ == "__main__":
    sys.exit(run_stage("runner", work))
