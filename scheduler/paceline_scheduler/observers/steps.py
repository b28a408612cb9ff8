"""Finished steps: their sums, and each one for those who watch."""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from paceline.plan.values import BatchPlan, Int32Array, StepResult
from paceline_scheduler.core.events import (
    Effects,
    Event,
    ExecutorAttached,
    ExecutorRemoved,
    StepFinished,
    StreamEnded,
)
from paceline_scheduler.core.executor.attachment import StepInFlight
from paceline_scheduler.core.outputs import TokenOutputs
from paceline_scheduler.core.views import CoreViews
from paceline_scheduler.errors import TooManyWatchersError

MAX_WATCHERS = 64
_MOST_NS = (1 << 63) - 1
_GAP_NS = 10_000  # what times between tokens are rounded to, so that the rows of a step share theirs


@dataclass(frozen=True, slots=True)
class DraftTotals:
    """Sums over the drafts of an executor; by place among a row's drafts as well."""

    num_verified: int = 0
    num_accepted: int = 0
    num_verified_at: tuple[int, ...] = ()
    num_accepted_at: tuple[int, ...] = ()


@dataclass(slots=True)
class StepTotals:
    """`starved_ns` is the part of `idle_ns` in which there was something to run, and its plan was late."""

    num_steps: int = 0
    num_rows: int = 0
    num_output_tokens: int = 0
    waited_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    idle_ns: int = 0
    starved_ns: int = 0
    planning_ns: int = 0
    draft_ns: int = 0
    predicted_ns: int = 0
    drafts: DraftTotals = field(default_factory=DraftTotals)


@dataclass(frozen=True, slots=True)
class StepRecord:
    address: str
    epoch: int
    step_id: int
    num_rows: int
    num_tokens: int
    num_output_tokens: int
    predicted_ns: int
    waited_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    idle_ns: int
    draft_ns: int
    planning_ns: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_waiting_requests: int
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_quarantined_blocks: int
    first_token_ns: tuple[int, ...] = ()  # of each request whose first token came
    gaps: tuple[tuple[int, int], ...] = ()  # nanoseconds between tokens, ascending, and how often


class StepSink(Protocol):
    """Called on the event loop; must not block."""

    def step_finished(self, record: StepRecord) -> None: ...


class StepWatch:
    def __init__(self) -> None:
        self.sinks: list[StepSink] = []

    def add(self, sink: StepSink) -> None:
        """Raises TooManyWatchersError."""
        if len(self.sinks) >= MAX_WATCHERS:
            raise TooManyWatchersError(
                f"{MAX_WATCHERS} calls watch steps already; end one of them, or ask ListExecutors for sums"
            )
        self.sinks.append(sink)

    def remove(self, sink: StepSink) -> None:
        self.sinks.remove(sink)

    def tell(self, record: StepRecord) -> None:
        for sink in tuple(self.sinks):
            sink.step_finished(record)


@dataclass(frozen=True, slots=True)
class _Planning:
    """`follows_work`: the step before it had not ended, or ended just then; the executor then waits for this plan, not
    for a request.
    """

    planning_ns: int
    predicted_ns: int
    follows_work: bool


@dataclass(slots=True)
class _ExecutorTimes:
    totals: StepTotals = field(default_factory=StepTotals)
    plannings: deque[_Planning] = field(default_factory=deque)  # of the plans in flight
    has_just_ended: bool = False  # a step, and what follows it is being planned
    incarnation: int = 0
    free_s: float | None = None  # since when, if nothing is planned for it; None while its stream is gone
    open_idle_ns: int = 0  # before the steps in flight
    cut_idle_ns: int = 0  # before its stream ended: its next step tells of it again
    lost_idle_ns: int = 0  # of earlier processes, of which no step told
    shown_idle_ns: int = 0

    def begin(self, incarnation: int, now: float) -> None:
        if incarnation != self.incarnation:
            self.lost_idle_ns, self.cut_idle_ns = self.lost_idle_ns + self.cut_idle_ns, 0
        self.incarnation, self.free_s, self.open_idle_ns = incarnation, now, 0
        self.plannings.clear()
        self.has_just_ended = False

    def end(self, now: float) -> None:
        self.cut_idle_ns += self.going_on_ns(now)
        self.free_s = None
        self.plannings.clear()

    def going_on_ns(self, now: float) -> int:
        if self.free_s is None:
            return 0
        return self.open_idle_ns if self.plannings else round((now - self.free_s) * 1e9)


class StepObserver:
    def __init__(self, views: CoreViews) -> None:
        self.watch = StepWatch()
        self._views = views
        self._executors: dict[str, _ExecutorTimes] = {}

    def totals(self, address: str) -> StepTotals:
        executor = self._executors.get(address)
        return StepTotals() if executor is None else replace(executor.totals)

    def idle_ns(self, address: str, now: float) -> int:
        """Up to now; never less than before."""
        executor = self._executors.get(address)
        if executor is None:
            return 0
        told_ns = executor.totals.idle_ns + executor.lost_idle_ns + executor.cut_idle_ns
        executor.shown_idle_ns = max(executor.shown_idle_ns, told_ns + executor.going_on_ns(now))
        return executor.shown_idle_ns

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        """A step planned in an earlier stream never finishes."""
        match event:
            case StepFinished(address, result):
                executor = self._executors[address]
                planning = executor.plannings.popleft()
                executor.has_just_ended = not self._views.is_idle(address)
                executor.free_s, executor.open_idle_ns, executor.cut_idle_ns = now, 0, 0
                _count(executor.totals, planning, result)
                if self.watch.sinks:
                    self.watch.tell(self._record(address, effects, planning.planning_ns, result))
            case ExecutorAttached(description):
                self._executors.setdefault(description.address, _ExecutorTimes()).begin(description.incarnation, now)
            case StreamEnded(address) if address in self._executors:
                self._executors[address].end(now)
            case ExecutorRemoved(address):
                self._executors.pop(address, None)

    def planned(self, address: str, now: float, plan: BatchPlan | None, planning_ns: int) -> None:
        executor = self._executors.get(address)
        if executor is None:
            return
        if plan is None:
            executor.has_just_ended = False
            return
        follows_work = bool(executor.plannings) or executor.has_just_ended
        if not executor.plannings:
            executor.open_idle_ns = executor.going_on_ns(now)
        executor.plannings.append(_Planning(planning_ns, plan.predicted_ns, follows_work))

    def _record(self, address: str, effects: Effects[StepInFlight], planning_ns: int, result: StepResult) -> StepRecord:
        timings, step, tokens = result.timings, effects.reply, effects.tokens
        num_waiting_requests, _ = self._views.num_waiting()
        blocks = self._views.counts(address).blocks
        return StepRecord(
            address=address,
            epoch=result.epoch,
            step_id=result.step_id,
            num_rows=len(step.index),
            num_tokens=int(np.add.reduce(step.num_scheduled)),
            num_output_tokens=len(result.token_ids),
            predicted_ns=step.predicted_ns,
            waited_ns=timings.waited_ns,
            prepare_ns=timings.prepare_ns,
            forward_ns=timings.forward_ns,
            sample_ns=timings.sample_ns,
            idle_ns=timings.idle_ns,
            draft_ns=timings.draft_ns,
            planning_ns=planning_ns,
            num_draft_tokens=int(result.num_draft_tokens.sum()),
            num_accepted_draft_tokens=int(_num_right(result).sum()),
            num_waiting_requests=num_waiting_requests,
            num_total_blocks=blocks.total,
            num_free_blocks=blocks.free,
            num_cached_blocks=blocks.cached,
            num_used_blocks=blocks.used,
            num_quarantined_blocks=blocks.total - blocks.free - blocks.cached - blocks.used,
            first_token_ns=tuple(round(s * 1e9) for batch in tokens for s in batch.first_tokens_s.values()),
            gaps=_gaps(tokens),
        )


def _gaps(batches: tuple[TokenOutputs, ...]) -> tuple[tuple[int, int], ...]:
    counts: Counter[int] = Counter()
    for tokens in batches:
        gaps_s, num_tokens = tokens.gaps()
        ns, place = np.unique(np.rint(gaps_s * (1e9 / _GAP_NS)).astype(np.int64), return_inverse=True)
        nums = np.bincount(place, weights=num_tokens, minlength=len(ns)).astype(np.int64)
        counts.update(dict(zip((ns * _GAP_NS).tolist(), nums.tolist(), strict=True)))
    return tuple(sorted(counts.items()))


def _count(totals: StepTotals, planning: _Planning, result: StepResult) -> None:
    timings = result.timings
    totals.num_steps += 1
    totals.num_rows += len(result.rows)
    totals.num_output_tokens += len(result.token_ids)
    totals.waited_ns = _sum(totals.waited_ns, timings.waited_ns)
    totals.prepare_ns = _sum(totals.prepare_ns, timings.prepare_ns)
    totals.forward_ns = _sum(totals.forward_ns, timings.forward_ns)
    totals.sample_ns = _sum(totals.sample_ns, timings.sample_ns)
    totals.idle_ns = _sum(totals.idle_ns, timings.idle_ns)
    if planning.follows_work:
        totals.starved_ns = _sum(totals.starved_ns, timings.idle_ns)
    totals.planning_ns += planning.planning_ns
    totals.predicted_ns = _sum(totals.predicted_ns, planning.predicted_ns)
    totals.draft_ns = _sum(totals.draft_ns, timings.draft_ns)
    if len(result.num_draft_tokens):
        totals.drafts = _with(totals.drafts, result.num_draft_tokens, _num_right(result))


def _num_right(result: StepResult) -> Int32Array:
    """How many drafts of each row became output; empty where nobody drafted."""
    if not len(result.num_draft_tokens):
        return result.num_draft_tokens
    return np.clip(result.num_accepted - 1, 0, result.num_draft_tokens)


def _with(totals: DraftTotals, num_verified: Int32Array, num_right: Int32Array) -> DraftTotals:
    verified_at = _count_places(totals.num_verified_at, num_verified)
    return DraftTotals(
        totals.num_verified + int(num_verified.sum()),
        totals.num_accepted + int(num_right.sum()),
        verified_at,
        _count_places(totals.num_accepted_at, num_right, len(verified_at)),
    )


def _count_places(counts: tuple[int, ...], lengths: Int32Array, at_least: int = 0) -> tuple[int, ...]:
    """One more at every place below each of these lengths."""
    num_places = max(len(counts), int(lengths.max(initial=0)), at_least)
    more = (lengths[:, np.newaxis] > np.arange(num_places)).sum(axis=0).tolist()
    return tuple(before + count for before, count in zip_longest(counts, more, fillvalue=0))


def _sum(total_ns: int, more_ns: int) -> int:
    """The largest number that travels: an executor may make numbers up."""
    return min(total_ns + more_ns, _MOST_NS)
