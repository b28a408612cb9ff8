"""Spans of sampled requests, phase by phase as each ends, and of steps that ran them.

A request is followed if the traceparent that it carries is sampled, also one that a former scheduler left. What is
sent at once survives this process: a span that is not over when it dies is lost.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.plan.values import BatchPlan, RecordId, StepResult
from paceline.process.trace_ids import SpanContext, read_trace_parent
from paceline_scheduler.core.ended import EndedRequest
from paceline_scheduler.core.events import (
    BeginAnew,
    Effects,
    Event,
    ExecutorAttached,
    ExecutorLost,
    ExecutorRemoved,
    Resume,
    StepFinished,
    Submit,
)
from paceline_scheduler.core.executor.attachment import StepInFlight
from paceline_scheduler.core.live import HeldRow, LiveRequest
from paceline_scheduler.core.phases import Phase
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.views import CoreViews
from paceline_scheduler.spans import names
from paceline_scheduler.spans.values import Attributes, Span, SpanSink

MAX_FOLLOWED = 4096
MAX_CHUNKS = 64
"""Of a placement: the last of them stands for all that follow."""

MAX_LINKS = 32
DECODE_STEP_EVERY_S = 1.0
"""How often an executor's step is shown that computes no chunk of a followed request."""

PHASES_EVERY_S = 1.0
"""How often a shown step has spans of its own phases below it: else they would be most of all spans."""

_NAMES = {Phase.QUEUED: names.QUEUE, Phase.PREEMPTED: names.PREEMPTED, Phase.DECODE: names.DECODE}


@dataclass(slots=True, eq=False)
class _Followed:
    """A followed request in one of its phases. `context` is that of the phase's span, `parent` of its listener's."""

    key: RecordId
    parent: SpanContext
    context: SpanContext
    phase: Phase
    held: HeldRow | None
    since_s: float
    links: list[SpanContext] = field(default_factory=list)
    num_chunks: int = 0
    chunk_s: float | None = None  # when the chunks began that have no span yet
    num_chunk_tokens: int = 0  # of these


class _PlannedStep(NamedTuple):
    planned_s: float
    planning_ns: int
    predicted_ns: int


@dataclass(slots=True)
class _Executor:
    epoch: int
    plannings: deque[_PlannedStep] = field(default_factory=deque)  # of the plans in flight
    free_s: float = 0.0  # when the newest result came
    shown_s: float = -math.inf  # when a step was shown last for its decodes
    phases_s: float = -math.inf  # when one was shown last with its phases
    rows: dict[int, _Followed] = field(default_factory=dict)  # that computed a first token
    prefilling: dict[int, _Followed] = field(default_factory=dict)


class TraceObserver:
    def __init__(self, views: CoreViews, sink: SpanSink) -> None:
        self._views = views
        self._sink = sink
        self._followed: dict[RecordId, _Followed] = {}
        self._executors: dict[str, _Executor] = {}

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        match event:
            case StepFinished(address, result):
                self._finish_step(address, effects.reply, result, now)
            case Submit(requests) | Resume(requests):
                for request in requests:
                    self._listen(request, now)
            case ExecutorAttached(description, snapshot):
                self._executors[description.address] = _Executor(description.epoch)
                self._adopt((seen.record_id for seen in snapshot.rows), now)
                self._look_again(now)
            case ExecutorLost():
                self._look_again(now)
            case ExecutorRemoved(address):
                self._look_again(now)
                self._executors.pop(address, None)
            case BeginAnew():
                self._followed.clear()
                self._executors.clear()
        for ended in effects.ended:
            self._end(ended, now)

    def planned(self, address: str, now: float, plan: BatchPlan | None, planning_ns: int) -> None:
        if plan is None:
            return
        self._executors[address].plannings.append(_PlannedStep(now, planning_ns, plan.predicted_ns))
        if not self._followed or not (plan.new_requests or plan.releases):
            return
        executor = self._executors[address]
        changed = [self._followed.get(new.record_id) for new in plan.new_requests]
        changed += [executor.rows.get(release.row) or executor.prefilling.get(release.row) for release in plan.releases]
        for followed in changed:
            if followed is not None:
                self._look(followed, now)

    # Requests

    def _listen(self, request: Request, now: float) -> None:
        if not self._followed and not request.trace_parent:
            return
        before = self._followed.pop(request.key, None)
        if before is not None:
            self._leave(before, now)
        context = read_trace_parent(request.trace_parent)
        live = self._views.open_request(request.key) if context is not None and context.is_sampled else None
        if context is not None and live is not None and len(self._followed) < MAX_FOLLOWED:
            self._enter(live, context, now)

    def _adopt(self, keys: Iterable[RecordId], now: float) -> None:
        """What a former scheduler followed."""
        for key in keys:
            live = None if key in self._followed else self._views.open_request(key)
            if live is not None:
                self._listen(live.request, now)

    def _look_again(self, now: float) -> None:
        for followed in tuple(self._followed.values()):
            self._look(followed, now)

    def _look(self, followed: _Followed, now: float) -> None:
        live = self._views.open_request(followed.key)
        if live is None:
            return  # it has just ended, which is told
        if (followed.phase, followed.held) != (live.phases.phase, _row_of(live)):
            self._leave(followed, now)
            self._enter(live, followed.parent, now)
        elif followed.held is not None:
            self._put_on_row(followed, followed.held)  # the executor may have been attached anew

    def _enter(self, live: LiveRequest, parent: SpanContext, now: float) -> None:
        phase = live.phases.phase
        assert phase is not None, "it is open"
        followed = _Followed(live.request.key, parent, self._sink.below(parent), phase, _row_of(live), now)
        self._followed[followed.key] = followed
        if followed.held is not None:
            self._put_on_row(followed, followed.held)

    def _put_on_row(self, followed: _Followed, held: HeldRow) -> None:
        executor = self._executors[held.address]
        rows = executor.prefilling if followed.phase is Phase.PREFILL else executor.rows
        rows[held.row] = followed

    def _leave(self, followed: _Followed, now: float, attributes: Attributes | None = None) -> None:
        held = followed.held
        executor = None if held is None else self._executors.get(held.address)
        if held is not None and executor is not None:
            for rows in (executor.rows, executor.prefilling):
                if rows.get(held.row) is followed:
                    del rows[held.row]
        name = _NAMES.get(followed.phase)
        if name is None:  # of a prefill the chunks are shown
            return
        span = Span(
            name=name,
            context=followed.context,
            parent=followed.parent,
            start_s=followed.since_s,
            end_s=now,
            attributes={**_place(followed), **(attributes or {})},
            links=tuple(followed.links),
        )
        self._sink.put(span)

    def _end(self, ended: EndedRequest, now: float) -> None:
        key = ended.request.key
        if key not in self._followed or self._views.open_request(key) is not None:  # its id is used again
            return
        attributes = {names.NUM_PREEMPTIONS: ended.num_preemptions, names.OUTPUT_TOKENS: ended.num_output_tokens}
        self._leave(self._followed.pop(key), now, attributes)

    # Steps

    def _finish_step(self, address: str, step: StepInFlight, result: StepResult, now: float) -> None:
        executor = self._executors[address]
        planning = executor.plannings.popleft()
        begun_s = max(planning.planned_s, executor.free_s)
        executor.free_s = now
        shown = None
        for row, followed in tuple(executor.prefilling.items()) if executor.prefilling else ():
            places = np.flatnonzero(step.index == row)
            if len(places):
                shown = shown or self._sink.below(None)
                place = int(places[0])
                is_last = bool(result.num_accepted[place])
                num_tokens, end = int(step.num_scheduled[place]), int(step.num_scheduled_after[place])
                self._chunk(followed, shown, begun_s, now, (num_tokens, end), is_last=is_last)
                if is_last:
                    self._look(followed, now)
                    decoding = self._followed.get(followed.key)
                    if decoding is not None and decoding is not followed:  # its first token is of this step
                        decoding.links.append(shown)
        if executor.rows and now - executor.shown_s >= DECODE_STEP_EVERY_S:
            executor.shown_s = now
            shown = shown or self._sink.below(None)
            for followed in executor.rows.values():
                if len(followed.links) < MAX_LINKS and shown not in followed.links[-1:]:
                    followed.links.append(shown)
        if shown is not None:
            self._show_step(address, executor, shown, planning, step, result, now)

    def _chunk(
        self,
        followed: _Followed,
        step: SpanContext,
        begun_s: float,
        now: float,
        tokens: tuple[int, int],
        *,
        is_last: bool,
    ) -> None:
        """`tokens`: how many, and the position behind them."""
        followed.chunk_s = begun_s if followed.chunk_s is None else followed.chunk_s
        followed.num_chunk_tokens += tokens[0]
        if followed.num_chunks + 1 >= MAX_CHUNKS and not is_last:
            return
        span = Span(
            name=names.PREFILL,
            context=self._sink.below(followed.parent),
            parent=followed.parent,
            start_s=followed.chunk_s,
            end_s=now,
            attributes={
                **_place(followed),
                names.NUM_TOKENS: followed.num_chunk_tokens,
                names.TOKENS_END: tokens[1],
            },
            links=(step,),
        )
        self._sink.put(span)
        followed.num_chunks += 1
        followed.chunk_s, followed.num_chunk_tokens = None, 0

    def _show_step(
        self,
        address: str,
        executor: _Executor,
        context: SpanContext,
        planning: _PlannedStep,
        step: StepInFlight,
        result: StepResult,
        now: float,
    ) -> None:
        timings = result.timings
        phases_ns = {
            names.STEP_PLAN: planning.planning_ns,
            names.STEP_WAIT: timings.waited_ns,
            names.STEP_PREPARE: timings.prepare_ns,
            names.STEP_FORWARD: timings.forward_ns,
            names.STEP_SAMPLE: timings.sample_ns + timings.draft_ns,
        }
        attributes: Attributes = {
            names.EXECUTOR: address,
            names.EPOCH: executor.epoch,
            names.STEP_ID: step.step_id,
            names.NUM_ROWS: len(step.index),
            names.NUM_TOKENS: step.num_tokens,
            names.NUM_DRAFT_TOKENS: int(np.add.reduce(result.num_draft_tokens)),
            names.PREDICTED_S: planning.predicted_ns / 1e9,
            names.IDLE_S: timings.idle_ns / 1e9,
            **{names.STEP_PHASES_S[name]: ns / 1e9 for name, ns in phases_ns.items()},
        }
        self._sink.put(Span(names.STEP, context, None, planning.planned_s, now, attributes))
        if now - executor.phases_s >= PHASES_EVERY_S:
            executor.phases_s = now
            self._show_phases(context, planning.planned_s, phases_ns, now)

    def _show_phases(self, context: SpanContext, planned_s: float, phases_ns: dict[str, int], now: float) -> None:
        """What the executor did is put as late as its result allows: its clock is not ours."""
        put, below = self._sink.put, self._sink.below
        plan_ns = phases_ns.pop(names.STEP_PLAN)
        put(Span(names.STEP_PLAN, below(context), context, planned_s, planned_s + plan_ns / 1e9))
        end_s = now
        for name, duration_ns in reversed(phases_ns.items()):
            start_s = max(planned_s, end_s - duration_ns / 1e9)
            if start_s < end_s:
                put(Span(name, below(context), context, start_s, end_s))
            end_s = start_s


def _row_of(live: LiveRequest) -> HeldRow | None:
    """One that is preempted holds its row until that is confirmed."""
    return live.held if live.phases.phase in (Phase.PREFILL, Phase.DECODE) else None


def _place(followed: _Followed) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {names.COMPLETION: followed.key.index}
    if followed.held is not None:
        attributes |= {names.EXECUTOR: followed.held.address, names.ROW: followed.held.row}
    return attributes
