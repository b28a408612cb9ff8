"""Run seeds, tell one's story, or see a safeguard missed: `PYTHONPATH=tests/support python -m simulation --help`."""

import os
import sys
from typing import Annotated

import typer

from simulation.ablations import ABLATIONS, Ablation
from simulation.run import first_failure, run_seed, run_seeds

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run.")] = 200,
    first: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Over how many processes.")] = os.cpu_count() or 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Run this one only, here, and tell how it ended.")] = None,
    story: Annotated[bool, typer.Option(help="Tell all of it.")] = False,
    twin: Annotated[bool, typer.Option(help="On executors that run a GPU's code, without a GPU.")] = False,
    ablation: Annotated[str | None, typer.Option(help="Go without a safeguard; 'list' names them.")] = None,
) -> None:
    """Run schedulers, executors, clients and their network in virtual time, with everything that can go wrong."""
    if ablation == "list":
        for name, each in ABLATIONS.items():
            print(f"{name:<14} {each.safeguard}")
    elif ablation is not None and ablation not in ABLATIONS:
        raise typer.BadParameter(f"--ablation: one of {', '.join(ABLATIONS)}, or list")
    elif ablation is not None:
        _look_for_failure(range(first, first + seeds), ABLATIONS[ablation])
    elif seed is not None:
        sys.exit(_tell(seed, whole_story=story, is_on_twins=twin))
    else:
        sys.exit(_run(range(first, first + seeds), processes, is_on_twins=twin))


def _run(seeds: range, num_processes: int, *, is_on_twins: bool) -> int:
    summary = run_seeds(seeds, num_processes, is_on_twins=is_on_twins)
    for outcome in summary.failed:
        print(f"seed {outcome.seed}: {outcome.failures[0]}")
    if summary.failed:
        _tell(summary.failed[0].seed, whole_story=False, is_on_twins=is_on_twins)
    print(summary)
    return len(summary.failed) > 0


def _tell(seed: int, *, whole_story: bool, is_on_twins: bool) -> int:
    outcome, story = run_seed(seed, whole_story=whole_story, is_on_twins=is_on_twins)
    if outcome.failures or whole_story:
        print(story)
    for failure in outcome.failures:
        print(f"failed: {failure}")
    print(f"trace {outcome.digest}; all of it: PYTHONPATH=tests/support python -m simulation --seed {seed} --story")
    return len(outcome.failures) > 0


def _look_for_failure(seeds: range, ablation: Ablation) -> None:
    with ablation.active():
        outcome = first_failure(seeds, ablation.guards_against)
    if outcome is None:
        print(f"nothing was noticed in {len(seeds)} seeds")
        sys.exit(1)
    print(f"noticed by seed {outcome.seed}: {outcome.failures[0]}")


if __name__ == "__main__":
    app()
