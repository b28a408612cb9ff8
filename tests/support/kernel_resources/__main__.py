"""`python -m kernel_resources sm_90 > table.csv`: compile every kernel for an architecture and print what it takes."""

import csv
import dataclasses
import sys

from kernel_resources.cases import cases
from kernel_resources.compiling import Resources, compile_case
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.gpu.no_gpu import compile_for


def main(architecture: Architecture) -> None:
    """Print the table: a header, and a line per kernel and case."""
    compile_for(int(architecture))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Resources))
    for case in cases(architecture):
        for resources in compile_case(case.name, case.call):
            writer.writerow(dataclasses.astuple(resources))


if __name__ == "__main__":
    main(Architecture[sys.argv[1].upper()])
