"""Counts what the runtime feeds the core and what comes of it, for `observers.definitions`.

One step costs the same whatever the number of its rows. Labels are bounded: models and executors by what there is,
tenants by number.
"""

from typing import Any, NamedTuple

import numpy as np

from paceline.plan.values import BatchPlan, FinishReason, StepTimings
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
from paceline_scheduler.core.executor.state import StepInFlight
from paceline_scheduler.core.executors import Placement
from paceline_scheduler.core.outputs import TokenOutputs
from paceline_scheduler.observers.definitions import BETWEEN_TOKENS_BOUNDS_S

MAX_TENANTS = 100
OTHER_TENANTS = "other"
_BOUNDS_S = np.array(BETWEEN_TOKENS_BOUNDS_S)
_DONE = (FinishReason.STOP, FinishReason.LENGTH)


class _Series(NamedTuple):
    """What every step adds to, found once."""

    model: str
    first_token: Histogram
    between_tokens: Histogram
    step_tokens: Histogram
    prepare: Histogram
    forward: Histogram
    sample: Histogram
    planning: Histogram

    @classmethod
    def of(cls, meter: Meter, address: str, model: str) -> "_Series":
        meter.begin("model_name", model)
        meter.begin("executor", address)
        return cls(
            model,
            meter.histogram("time_to_first_token_seconds", model),
            meter.histogram("inter_token_latency_seconds", model),
            meter.histogram("step_tokens", address),
            meter.histogram("step_seconds", address, "prepare"),
            meter.histogram("step_seconds", address, "forward"),
            meter.histogram("step_seconds", address, "sample"),
            meter.histogram("planning_seconds", address),
        )


class ServingObserver:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._series: dict[str, _Series] = {}  # by address, as it was attached last
        self._tenants: set[str] = set()
        self._recoveries = _Recoveries(meter)

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        if isinstance(event, StepFinished):
            series = self._series[event.address]
            self._count_step(series, effects.reply, event.result.timings)
            self._count_tokens(series, effects.outputs.tokens)
        else:
            self._recoveries.saw(event, now)
            if isinstance(event, ExecutorAttached):
                description = event.description
                series = _Series.of(self._meter, description.address, description.model)
                self._series[description.address] = series
                self._count_tokens(series, effects.outputs.tokens)
            elif isinstance(event, ExecutorRemoved):
                self._series.pop(event.address, None)
                self._meter.forget("executor", event.address)
        for ended in effects.ended:
            self._count_ended(ended)

    def planned(self, address: str, now: float, plan: BatchPlan | None, planning_ns: int) -> None:
        del now
        if plan is None:
            return
        self._series[address].planning.observe(planning_ns / 1e9)
        for new in plan.new_requests:
            assert isinstance(new, Placement), "the core writes no others"
            self._count_placement(new)

    def _count_placement(self, new: Placement) -> None:
        request, add = new.request, self._meter.add
        if new.attempt == 1:
            add("prompt_tokens_total", len(request.prompt_token_ids), request.model)
            add("prompt_tokens_cached_total", new.num_cached_tokens, request.model)
        if not request.bypass_prefix_cache:
            num_known = len(request.prompt_token_ids) + len(new.output_token_ids)
            add("prefix_cache_queries_total", num_known, request.model)
            add("prefix_cache_hits_total", new.num_cached_tokens, request.model)

    def _count_step(self, series: _Series, step: StepInFlight, timings: StepTimings) -> None:
        series.step_tokens.observe(step.num_tokens)
        series.prepare.observe(timings.prepare_ns / 1e9)
        series.forward.observe(timings.forward_ns / 1e9)
        series.sample.observe(timings.sample_ns / 1e9)
        if step.num_preempted:
            self._meter.add("preemptions_total", step.num_preempted, series.model)

    def _count_tokens(self, series: _Series, batches: tuple[TokenOutputs, ...]) -> None:
        for tokens in batches:
            self._meter.add("generation_tokens_total", len(tokens.token_ids), series.model)
            for seconds in tokens.first_tokens_s.values():
                series.first_token.observe(seconds)
            if len(tokens.intervals_s):
                _count_intervals(series.between_tokens, tokens)

    def _count_ended(self, ended: EndedRequest) -> None:
        model, meter = ended.request.model, self._meter
        tenant, num_prompt = self._tenant(ended.request.key.tenant), len(ended.request.prompt_token_ids)
        meter.add("request_success_total", 1, model, end_name(ended))
        meter.add("tenant_requests_total", 1, tenant)
        meter.add("tenant_prompt_tokens_total", num_prompt, tenant)
        meter.add("tenant_generation_tokens_total", ended.num_output_tokens, tenant)
        if ended.reason not in _DONE:
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


def _count_intervals(histogram: Histogram, tokens: TokenOutputs) -> None:
    """Tokens that came together share the time that they took."""
    intervals_s, num_tokens = tokens.intervals_s, tokens.num_tokens
    is_first = np.isnan(intervals_s)
    if np.count_nonzero(is_first) or np.count_nonzero(num_tokens) < len(num_tokens):
        known = ~is_first & (num_tokens > 0)
        intervals_s, num_tokens = intervals_s[known], num_tokens[known]
    buckets = np.searchsorted(_BOUNDS_S, intervals_s / num_tokens)
    counts = np.bincount(buckets, weights=num_tokens, minlength=len(_BOUNDS_S) + 1)
    histogram.add(counts.astype(np.int64).tolist(), float(np.add.reduce(intervals_s)))


class _Recoveries:
    """Of a stream, an executor, or the scheduler before this one."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._incarnations: dict[str, int] = {}  # by address, of those ever attached
        self._attached: set[str] = set()
        self._ended_s: dict[str, float] = {}  # when the stream to one of these ended

    def saw(self, event: Event[Any], now: float) -> None:
        match event:
            case StreamEnded(address) if address in self._attached:
                self._attached.remove(address)
                self._ended_s[address] = now
            case ExecutorAttached(description, snapshot):
                address, incarnation = description.address, description.incarnation
                before = self._incarnations.get(address)
                if before is None and any(seen.request_context is not None for seen in snapshot.rows):
                    self._meter.add("recoveries_total", 1, "scheduler")
                elif before is not None:
                    self._recovered("stream" if before == incarnation else "executor", address, now)
                self._incarnations[address] = incarnation
                self._attached.add(address)
            case ExecutorLost(address):
                self._recovered("executor", address, now)
            case ExecutorRemoved(address):
                self._incarnations.pop(address, None)
                self._attached.discard(address)
                self._ended_s.pop(address, None)
            case BeginAnew():
                self._incarnations.clear()
                self._attached.clear()
                self._ended_s.clear()

    def _recovered(self, kind: str, address: str, now: float) -> None:
        ended_s = self._ended_s.pop(address, None)
        if ended_s is not None:  # else its requests were told to go on elsewhere
            self._meter.add("recoveries_total", 1, kind)
            self._meter.observe("recovery_pause_seconds", now - ended_s, kind)


def end_name(ended: EndedRequest) -> str:
    if ended.reason is FinishReason.ERROR and ended.is_abandoned:
        return "abandoned"
    return ended.reason.name.lower()
