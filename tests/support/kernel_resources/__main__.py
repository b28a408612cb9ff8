"""`python -m kernel_resources sm_90 > table.csv`: compile every kernel for a GPU and print what it takes."""

import csv
import dataclasses
import sys

from kernel_resources.cases import cases
from kernel_resources.compiling import Resources, compile_case
from paceline_kernels.gpu.no_gpu import compile_for


def main(capability: int) -> None:
    """Print the table: a header, and a line per kernel and case."""
    compile_for(capability)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Resources))
    for case in cases(capability):
        for resources in compile_case(case.name, case.call):
            writer.writerow(dataclasses.astuple(resources))


if __name__ == "__main__":
    main(int(sys.argv[1].removeprefix("sm_")))
