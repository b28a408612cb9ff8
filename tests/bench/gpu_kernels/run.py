"""The course of a run: tests, ceilings, odd shapes checked, cases timed, targets summed up. Knows no operation."""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import triton

from gpu_kernels.anchors import Anchors
from gpu_kernels.case import Case, Place, Scale
from gpu_kernels.cases import cases
from gpu_kernels.device_tests import run_tests
from gpu_kernels.measure import check, measure
from gpu_kernels.results import Ceilings, Failure, Result
from gpu_kernels.table import HEADER, line, summary
from gpu_kernels.timing import Clock, CudaClock, RehearsalClock, ceilings

_TESTS_SHARE = 0.5  # of the time there is
_FIRST_WITH_FP8 = (8, 9)  # compute capability
_ANCHORS_ARE_OF = "H200"


@dataclass(slots=True)
class Run:
    """One run and what it has found. Prints as it goes, so that a run that is cut short has shown what it had."""

    anchors: Anchors
    json_file: Path | None
    deadline: float  # by the monotonic clock
    words: Sequence[str] = ()  # only operations whose names hold one of these; none want all
    results: list[Result | Failure] = field(default_factory=list)
    num_failed: int = 0
    num_left: int = 0

    def on_gpu(self, scale: Scale, *, with_tests: bool) -> int:
        """Everything on the current CUDA device. Returns the exit code."""
        has_fp8 = torch.cuda.get_device_capability() >= _FIRST_WITH_FP8
        place, clock = Place(torch.device("cuda"), torch.bfloat16, has_fp8), CudaClock()
        if with_tests:
            ran = run_tests(timeout_s=_TESTS_SHARE * max(0.0, self.deadline - time.monotonic()))
            self.num_failed += not ran.is_good
            print(ran.report, flush=True)
        reached = ceilings(clock, place)
        name = torch.cuda.get_device_name()
        print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
        if self.anchors.fastest and _ANCHORS_ARE_OF not in name:
            print(f"The anchors were measured on an {_ANCHORS_ARE_OF}, which this is not.")
        ours = f"{reached.copy_tbps:.2f} TB/s copied, {reached.product_tflops:.0f} TFLOP/s in a large product"
        fp8 = "" if reached.fp8_tflops is None else f", {reached.fp8_tflops:.0f} in one of float8"
        print(f"what 100 % of the limit is: {ours}{fp8}", flush=True)
        self._time(self._wanted(scale, place), place, clock, reached)
        self._check_odd_shapes(place)  # last: an illegal access spoils whatever comes after it
        return self._exit_code()

    def rehearsed(self) -> int:
        """The same code on the CPU, interpreted, with tiny shapes and times that are made up. Returns the exit code."""
        place, clock = Place(torch.device("cpu"), torch.float16), RehearsalClock()
        print("A rehearsal: results are checked, times and all that is made of them are invented.")
        with np.errstate(all="ignore"):  # infinity and NaN are results like others
            self._time(self._wanted(Scale.ODD, place), place, clock, ceilings(clock, place, copy_bytes=64, size=8))
        return self._exit_code()

    def _wanted(self, scale: Scale, place: Place) -> Iterator[Case]:
        return (case for case in cases(scale, place) if not self.words or any(map(case.op.__contains__, self.words)))

    def _exit_code(self) -> int:
        """0 if all that was asked for was measured, and is right."""
        if not self.results and not self.num_left:
            print(f"no operation has {' or '.join(self.words)} in its name: there are {', '.join(_all_operations())}")
        return 0 if self.results and not self.num_failed and not self.num_left else 1

    def _check_odd_shapes(self, place: Place) -> None:
        """All operations at sizes that are multiples of nothing; only what fails is printed."""
        odd = list(self._wanted(Scale.ODD, place))
        for case in odd:
            try:
                check(case)
            except Exception as error:
                self._fail(case, error)
        print(f"{len(odd)} odd shapes checked, {self.num_failed} failures so far", flush=True)

    def _time(self, wanted: Iterator[Case], place: Place, clock: Clock, reached: Ceilings) -> None:
        print(HEADER)
        for case in wanted:
            if time.monotonic() > self.deadline:
                self.num_left += 1
                continue
            try:
                self.results.append(measure(case, clock, reached, self.anchors))
                print(line(self.results[-1]), flush=True)
            except Exception as error:
                self._fail(case, error)
            self._write(reached)
            if place.device.type == "cuda" and not _is_usable():
                break
        print("\n".join(summary(self.results)))
        if self.num_left:
            print(f"{self.num_left} cases were left out: the time was up")

    def _fail(self, case: Case, error: Exception) -> None:
        """Whatever is wrong with one case, the others are still worth knowing."""
        self.num_failed += 1
        first = str(error).strip().splitlines()[:1]
        self.results.append(Failure(case, " ".join([type(error).__name__, *first])[:200]))
        print(line(self.results[-1]), flush=True)

    def _write(self, reached: Ceilings) -> None:
        if self.json_file is None:
            return
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: a rehearsal"
        found = {
            "device": device,
            "torch": torch.__version__,
            "triton": triton.__version__,
            **dataclasses.asdict(reached),
            "results": [_figures(result) for result in self.results],
        }
        self.json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _all_operations() -> list[str]:
    return list(dict.fromkeys(case.op for case in cases(Scale.ODD, Place(torch.device("cpu"), torch.float16))))


def _is_usable() -> bool:
    """Whether the device still answers; nothing does after an illegal access. Its memory is free afterwards."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print("the device is lost, nothing more can be timed:", *str(error).splitlines()[:1], flush=True)
        return False
    return True


def _figures(result: Result | Failure) -> dict[str, object]:
    named: dict[str, object] = {"op": result.case.op, "shape": dict(result.case.shape)}
    if isinstance(result, Failure):
        return named | {"failure": result.sentence}
    return named | {
        "us": result.us,
        "spread": result.timing.spread,
        "num_bytes": result.case.num_bytes,
        "num_flops": result.case.num_flops,
        "rate": result.rate,
        "rate_unit": result.case.bound.unit,
        "share_of_ceiling": result.share_of_ceiling,
        "torch_failure": result.torch_failure,
        "torch_us": None if result.theirs is None else result.theirs.us,
        "anchor_us": None if result.anchor is None else result.anchor.us,
        "anchor_stack": None if result.anchor is None else result.anchor.stack,
    }
