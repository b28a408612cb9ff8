"""Counts what the runtime feeds the core and what comes of it, for `observers.definitions`.

A step is kept, and counted together with those after it, when nothing waits for that or somebody looks: between two
steps the code is never in the caches. Labels are bounded: models and executors by what there is, tenants by number.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.plan.values import BatchPlan, FinishReason, NewRequest, StepTimings
from paceline.process.metrics import Histogram, Meter
from paceline_scheduler.core.ended import EndedRequest
from paceline_scheduler.core.events import (
    BeginAnew,
    Effects,
    Event,
    ExecutorAttached,
    ExecutorLost,
    ExecutorRemoved,
    StepFinished,
    StreamEnded,
)
from paceline_scheduler.core.executor.attachment import StepInFlight
from paceline_scheduler.core.executors import Placement
from paceline_scheduler.core.outputs import TokenOutputs, gaps
from paceline_scheduler.observers.recoveries import DONE, Recoveries

MAX_TENANTS = 100
OTHER_TENANTS = "other"
_MAX_KEPT = 64  # steps, placements, ends
_OF_EXECUTORS = (StreamEnded, ExecutorAttached, ExecutorLost, ExecutorRemoved, BeginAnew)
_Values = npt.NDArray[np.float64]


class _Buckets:
    """A histogram that takes many values at once."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds = np.array(histogram.bounds)

    def add(self, values: _Values, weights: npt.NDArray[np.int32] | None = None) -> None:
        """Each value counts once, or `weights` times."""
        places = np.searchsorted(self._bounds, values)
        counts = np.bincount(places, weights, len(self._bounds) + 1).astype(np.int64)
        total = np.add.reduce(values if weights is None else values * weights)
        self._histogram.add(counts.tolist(), float(total))


@dataclass(slots=True)
class _ExecutorTally:
    """What its steps add to, found once, and what they have not added yet."""

    model: str
    first_token: _Buckets
    between_tokens: _Buckets
    step_tokens: _Buckets
    prepare: _Buckets
    forward: _Buckets
    sample: _Buckets
    planning: _Buckets
    steps: list[tuple[StepInFlight, StepTimings]] = field(default_factory=list)
    plannings_ns: list[int] = field(default_factory=list)
    intervals_s: list[_Values] = field(default_factory=list)
    num_tokens: list[npt.NDArray[np.int32]] = field(default_factory=list)  # of each interval
    first_tokens_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0

    @classmethod
    def of(cls, meter: Meter, address: str, model: str) -> "_ExecutorTally":
        meter.begin("model_name", model)
        meter.begin("executor", address)
        return cls(
            model,
            _Buckets(meter.histogram("time_to_first_token_seconds", model)),
            _Buckets(meter.histogram("inter_token_latency_seconds", model)),
            _Buckets(meter.histogram("step_tokens", address)),
            _Buckets(meter.histogram("step_seconds", address, "prepare")),
            _Buckets(meter.histogram("step_seconds", address, "forward")),
            _Buckets(meter.histogram("step_seconds", address, "sample")),
            _Buckets(meter.histogram("planning_seconds", address)),
        )

    def keep(self, batches: Iterable[TokenOutputs]) -> None:
        for tokens in batches:
            self.num_output_tokens += len(tokens.token_ids)
            if tokens.first_tokens_s:
                self.first_tokens_s.extend(tokens.first_tokens_s.values())
            if len(tokens.intervals_s):
                self.intervals_s.append(tokens.intervals_s)
                self.num_tokens.append(tokens.num_tokens[: len(tokens.intervals_s)])

    def settle(self, meter: Meter) -> None:
        if self.steps:
            steps, timings = zip(*self.steps, strict=True)
            self.step_tokens.add(np.array([step.num_tokens for step in steps], dtype=np.float64))
            self.prepare.add(np.array([each.prepare_ns for each in timings]) / 1e9)
            self.forward.add(np.array([each.forward_ns for each in timings]) / 1e9)
            self.sample.add(np.array([each.sample_ns for each in timings]) / 1e9)
            meter.add("num_preemptions_total", sum(step.num_preempted for step in steps), self.model)
        if self.plannings_ns:
            self.planning.add(np.array(self.plannings_ns) / 1e9)
        if self.first_tokens_s:
            self.first_token.add(np.array(self.first_tokens_s))
        if self.intervals_s:
            self.between_tokens.add(*gaps(np.concatenate(self.intervals_s), np.concatenate(self.num_tokens)))
        meter.add("generation_tokens_total", self.num_output_tokens, self.model)
        for kept in (self.steps, self.plannings_ns, self.first_tokens_s, self.intervals_s, self.num_tokens):
            kept.clear()
        self.num_output_tokens = 0


class ServingObserver:
    def __init__(self, meter: Meter, later: Callable[[Callable[[], None]], None]) -> None:
        """`later` calls once what took place has had its effects."""
        self._meter = meter
        self._later = later
        self._is_due = False
        meter.settle = self._settle
        self._executors: dict[str, _ExecutorTally] = {}  # by address, as it was attached last
        self._ended: list[tuple[EndedRequest, ...]] = []
        self._placed: list[tuple[NewRequest, ...]] = []
        self._num_kept = 0
        self._tenants: set[str] = set()
        self._recoveries = Recoveries(meter)

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        if isinstance(event, StepFinished):
            executor = self._executors[event.address]
            executor.steps.append((effects.reply, event.result.timings))
            executor.keep(effects.tokens)
            self._num_kept += 1
            if self._recoveries.successor_of:
                self._recoveries.stepped(event.address, event.result.timings)
        elif isinstance(event, _OF_EXECUTORS):
            self._settle()
            self._recoveries.saw(event, now, effects)
            if isinstance(event, ExecutorAttached):
                description = event.description
                executor = _ExecutorTally.of(self._meter, description.address, description.model)
                self._executors[description.address] = executor
                executor.keep(effects.tokens)
            elif isinstance(event, ExecutorRemoved):
                self._executors.pop(event.address, None)
                self._meter.forget("executor", event.address)
        if effects.ended:
            self._recoveries.ended(effects.ended, now)
            self._ended.append(effects.ended)
            self._num_kept += len(effects.ended)
        if self._num_kept >= _MAX_KEPT and not self._is_due:
            self._is_due = True
            self._later(self._settle)

    def planned(self, address: str, now: float, plan: BatchPlan | None, planning_ns: int) -> None:
        if plan is None:
            return
        self._recoveries.planned(address, now, plan)
        self._executors[address].plannings_ns.append(planning_ns)
        if plan.new_requests:
            self._placed.append(plan.new_requests)
            self._num_kept += len(plan.new_requests)

    def _settle(self) -> None:
        self._num_kept, self._is_due = 0, False
        for executor in self._executors.values():
            executor.settle(self._meter)
        for new in chain.from_iterable(self._placed):
            assert isinstance(new, Placement), "the core writes no others"
            self._count_placement(new)
        for ended in chain.from_iterable(self._ended):
            self._count_ended(ended)
        self._placed.clear()
        self._ended.clear()

    def _count_placement(self, new: Placement) -> None:
        request, add = new.request, self._meter.add
        if new.attempt == 1:
            add("prompt_tokens_total", len(request.prompt_token_ids), request.model)
            add("prompt_tokens_cached_total", new.num_cached_tokens, request.model)
        if not request.bypass_prefix_cache:
            num_known = len(request.prompt_token_ids) + len(new.output_token_ids)
            add("prefix_cache_queries_total", num_known, request.model)
            add("prefix_cache_hits_total", new.num_cached_tokens, request.model)

    def _count_ended(self, ended: EndedRequest) -> None:
        model, meter = ended.request.model, self._meter
        tenant, num_prompt = self._tenant(ended.request.key.tenant), len(ended.request.prompt_token_ids)
        meter.add("request_success_total", 1, model, end_name(ended))
        meter.add("tenant_requests_total", 1, tenant)
        meter.add("tenant_prompt_tokens_total", num_prompt, tenant)
        meter.add("tenant_generation_tokens_total", ended.num_output_tokens, tenant)
        if ended.reason not in DONE:
            return
        meter.observe("request_prompt_tokens", num_prompt, model)
        meter.observe("request_generation_tokens", ended.num_output_tokens, model)
        if ended.times is not None:
            meter.observe("e2e_request_latency_seconds", ended.times.total_s, model)
            meter.observe("request_queue_time_seconds", ended.times.queued_s, model)
            meter.observe("request_prefill_time_seconds", ended.times.prefill_s, model)
            meter.observe("request_decode_time_seconds", ended.times.decode_s, model)
            if ended.seconds_per_token is not None:
                meter.observe("request_time_per_output_token_seconds", ended.seconds_per_token, model)

    def _tenant(self, tenant: str) -> str:
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(tenant)
        return tenant if tenant in self._tenants else OTHER_TENANTS


def end_name(ended: EndedRequest) -> str:
    if ended.reason is FinishReason.ERROR and ended.is_abandoned:
        return "abandoned"
    return ended.reason.name.lower()
