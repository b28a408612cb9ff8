"""Walk the scenarios, or look at what happens without a safeguard: `python -m exhaustive --help`."""

import argparse
import sys
import time
from collections.abc import Callable

from exhaustive.safeguards import SAFEGUARDS
from exhaustive.scenarios import REVEALING, SHORT, SLOW, SOAK


def main() -> int:
    """Return the exit status: 1 when something goes wrong that should not."""
    parser = argparse.ArgumentParser(prog="python -m exhaustive", description=__doc__)
    parser.add_argument("--tier", choices=("test", "all", "soak"), default="test", help="how many scenarios: minutes")
    parser.add_argument(
        "--without", choices=sorted(REVEALING), help="tell the story of a system without this safeguard"
    )
    arguments = parser.parse_args()
    if arguments.without is not None:
        print(f"{REVEALING[arguments.without].name}; it is not so that {SAFEGUARDS[arguments.without].safeguard}:")
        with SAFEGUARDS[arguments.without].active():
            return _walk(REVEALING[arguments.without].walk)
    more = {"test": (), "all": SLOW, "soak": (*SLOW, *SOAK)}[arguments.tier]
    status = 0
    for scenario in (*SHORT, *more):
        print(scenario.name)
        status |= _walk(scenario.walk)
    return status


def _walk(walk: Callable[[], int]) -> int:
    started_s = time.process_time()
    try:
        num_runs = walk()
    except AssertionError as wrong:
        print(wrong)
        return 1
    print(f"  {num_runs:,} runs in {time.process_time() - started_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
