"""Check the models, or look at what happens without a safeguard: `python -m protocol_model --help`."""

import argparse
import sys
import time

from rich.console import Console
from rich.table import Table

from protocol_model.checker import explore
from protocol_model.scenarios import LONG, REVEALING, SHORT, Safeguard, Scenario


def main() -> int:
    """Return the exit status: 1 when an invariant is violated that should hold."""
    parser = argparse.ArgumentParser(prog="python -m protocol_model", description=__doc__)
    parser.add_argument("--long", action="store_true", help="check the larger scenarios too: a few minutes")
    names = {safeguard.name.lower().replace("_", "-"): safeguard for safeguard in REVEALING}
    parser.add_argument("--without", choices=sorted(names), help="tell the story of a system without this safeguard")
    arguments = parser.parse_args()
    if arguments.without is not None:
        _tell_without(names[arguments.without])
        return 0
    return _check((*SHORT, *LONG) if arguments.long else SHORT)


def _check(scenarios: tuple[Scenario, ...]) -> int:
    console = Console()
    table = Table("scenario", "states", "transitions", "seconds", "", box=None)
    for column in table.columns[1:4]:
        column.justify = "right"
    stories = []
    for scenario in scenarios:
        started_s = time.process_time()
        report = explore(scenario.model())
        seconds = f"{time.process_time() - started_s:.1f}"
        verdict = "violated" if report.story else "all invariants hold"
        table.add_row(scenario.name, f"{report.num_states:,}", f"{report.num_transitions:,}", seconds, verdict)
        if report.story:
            stories.append((scenario.name, *report.story))
    console.print(table)
    for story in stories:
        print("", *story, sep="\n")
    return 1 if stories else 0


def _tell_without(safeguard: Safeguard) -> None:
    scenario = REVEALING[safeguard]
    report = explore(scenario.model(safeguard))
    print(f"{scenario.name}; it is not so that {safeguard.value}:", *report.story, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
