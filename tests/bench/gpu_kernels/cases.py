"""All cases, in the order of the table. Apart from `run`, because tests go through them without measuring."""

from collections.abc import Iterator

from gpu_kernels import attention_cases, expert_cases, product_cases, row_cases, sampling_cases
from gpu_kernels.case import Case, Place, Scale


def cases(scale: Scale, place: Place) -> Iterator[Case]:
    """Those that a step of a model spends most time in first; without float8 where the device has none."""
    modules = (attention_cases, product_cases, expert_cases, row_cases, sampling_cases)
    for cases_of in (*(module.cases for module in modules), attention_cases.cases_of_other_models):
        for case in cases_of(scale, place):
            if place.has_fp8 or "fp8" not in case.shape.values():
                yield case
