"""What an executor shows of itself on its metrics port: sums over the results of its steps, and who drives it.

Nothing is measured for it: steps carry their timings anyway.
"""

from collections.abc import Callable, Mapping

import numpy as np

from paceline.plan.values import StepResult
from paceline.process.metrics import Definition, Kind, Labels, Meter, Reading
from paceline_executor.link.description import Description
from paceline_executor.link.step_loop import Report

STEP_BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
_INFO_LABELS = ("model_name", "architecture", "device", "quantization", "kv_cache_dtype")


def _counter(name: str, meaning: str) -> Definition:
    return Definition(f"executor_{name}", Kind.COUNTER, meaning)


def _gauge(name: str, meaning: str, *labels: str) -> Definition:
    return Definition(f"executor_{name}", Kind.GAUGE, meaning, labels)


COUNTED = (
    Definition("executor_step_seconds", Kind.HISTOGRAM, "Device time of steps by phase.", ("phase",), STEP_BOUNDS_S),
    _counter("rows_total", "Rows of all steps."),
    _counter("generation_tokens_total", "Generated tokens."),
    _counter("draft_tokens_total", "Verified drafts."),
    _counter("accepted_draft_tokens_total", "The part of them that became output."),
    _counter("draft_seconds_total", "Time that drafting took."),
    _counter("plan_wait_seconds_total", "Time that plans lay ready before their step."),
    _counter("refused_plans_total", "Plans that were not executed."),
    _counter("failed_steps_total", "The part of them whose step failed."),
)
IS_DRIVEN = _gauge("is_driven", "1 while a scheduler drives it.")
EPOCH = _gauge("epoch", "How often a scheduler was accepted.")
INFO = _gauge("info", "Always 1.", *_INFO_LABELS)
WEIGHT_BYTES = _gauge("weight_bytes", "Bytes of memory that the model's weights take.")
RANKS = _gauge("ranks", "Processes that share each layer of the model.")
KV_BLOCKS = _gauge("kv_blocks", "Blocks of the KV cache.")
KV_CACHE_BYTES = _gauge("kv_cache_bytes", "Bytes of the KV cache.")
IDLE = _counter("idle_seconds_total", "Time without a step.")
PROFILED_RATE = _gauge("profiled_bytes_per_second", "Bytes that kernels read, in the last profile.", "kernel")
EXPERT_LOAD = _gauge(
    "expert_load_ratio", "Most tokens of an expert by the mean, in a layer of the last step; of packed weights on CPUs."
)
READ = (IS_DRIVEN, EPOCH, INFO, WEIGHT_BYTES, RANKS, KV_BLOCKS, KV_CACHE_BYTES, IDLE, PROFILED_RATE, EXPERT_LOAD)


class ExecutorMetrics:
    """`driven` tells whether a scheduler drives it, and the epoch; `idle_ns` how long it had no step up to now."""

    def __init__(self, driven: Callable[[], tuple[bool, int]], idle_ns: Callable[[], int]) -> None:
        self._meter = Meter(COUNTED)
        self._driven = driven
        self._idle_ns = idle_ns
        self._description: Description | None = None
        self._rates: Mapping[str, float] = {}

    def describe(self, description: Description) -> None:
        self._description = description

    def profiled(self, rates: Mapping[str, float]) -> None:
        """What kernels reached in a profile: bytes per second by kind."""
        self._rates = rates

    def saw(self, report: Report) -> None:
        meter = self._meter
        if not isinstance(report, StepResult):
            meter.add("executor_refused_plans_total", 1)
            meter.add("executor_failed_steps_total", report.failed is not None)
            return
        timings = report.timings
        meter.observe("executor_step_seconds", timings.prepare_ns / 1e9, "prepare")
        meter.observe("executor_step_seconds", timings.forward_ns / 1e9, "forward")
        meter.observe("executor_step_seconds", timings.sample_ns / 1e9, "sample")
        meter.add("executor_rows_total", len(report.rows))
        meter.add("executor_generation_tokens_total", len(report.token_ids))
        if len(report.num_draft_tokens):
            meter.add("executor_draft_tokens_total", int(report.num_draft_tokens.sum()))
            right = np.clip(report.num_accepted - 1, 0, report.num_draft_tokens)
            meter.add("executor_accepted_draft_tokens_total", int(right.sum()))
        meter.add("executor_draft_seconds_total", timings.draft_ns / 1e9)
        meter.add("executor_plan_wait_seconds_total", timings.waited_ns / 1e9)

    def read(self) -> list[Reading]:
        is_driven, epoch = self._driven()
        gauges: dict[Definition, dict[Labels, float]] = {IS_DRIVEN: {(): is_driven}, EPOCH: {(): epoch}}
        gauges[IDLE] = {(): self._idle_ns() / 1e9}
        gauges[PROFILED_RATE] = {(kind,): rate for kind, rate in self._rates.items()}
        description = self._description
        if description is not None:
            geometry = description.geometry
            names = (
                *(description.model, description.architecture, description.device, description.quantization),
                description.kv_dtype,
            )
            gauges[INFO] = {names: 1}
            gauges[WEIGHT_BYTES] = {(): description.weight_bytes}
            gauges[RANKS] = {(): description.num_ranks}
            gauges[KV_BLOCKS] = {(): geometry.num_blocks}
            ratio = description.expert_load_ratio()
            gauges[EXPERT_LOAD] = {} if ratio is None else {(): ratio}
            gauges[KV_CACHE_BYTES] = {(): geometry.num_blocks * geometry.bytes_per_block}
        of_forms = [] if description is None or description.forms is None else description.forms.meter.read()
        return [*self._meter.read(), *of_forms, *(Reading(definition, values) for definition, values in gauges.items())]
