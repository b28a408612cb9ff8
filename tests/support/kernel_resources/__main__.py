"""`python -m kernel_resources sm_90 [KNOWN]`: print what every kernel takes on a GPU, as a table.

KNOWN is such a table. What it has of code that is still the same is not compiled again, which takes minutes.
"""

import csv
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from kernel_resources.cases import cases
from kernel_resources.compiling import Resources, resources_of
from paceline_kernels.gpu.no_gpu import compile_for
from paceline_kernels.warm_up.triton_kernels import settle_keys


def main(capability: int, *tables: Path) -> None:
    """Print the table: a header, and a line per kernel and case."""
    known = [row for table in tables for row in _read(table)]
    compile_for(capability)
    settle_keys()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Resources))
    for resources in resources_of(cases(capability), known):
        writer.writerow(dataclasses.astuple(resources))


def _read(table: Path) -> Iterator[Resources]:
    for line in csv.DictReader(table.read_text(encoding="utf-8").splitlines()):
        case, kernel, code = line.pop("case"), line.pop("kernel"), line.pop("code")
        yield Resources(case=case, kernel=kernel, code=code, **{name: int(number) for name, number in line.items()})


if __name__ == "__main__":
    main(int(sys.argv[1].removeprefix("sm_")), *map(Path, sys.argv[2:]))
