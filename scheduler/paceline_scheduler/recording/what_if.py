"""What other settings of the scheduler would have done with the requests of a recording: a simulation, and says so.

The core is the real one, fed with the recorded arrivals, cancels and bounds. Executors are simulated: a step takes as
long as least squares over the recorded steps say of its tokens, pairs and drafts; a request gets the output that it
got. Left out are faults, clients that come back, and what a faster answer would have made clients ask.
"""

import heapq
import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.plan.hashes import HASH_START, grant_hash
from paceline.plan.values import BatchPlan, FinishReason, Int32Array, RecordId, RowFinish, StepResult, StepTimings
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.ended import EndedRequest
from paceline_scheduler.core.events import (
    Cancel,
    Effects,
    Event,
    ExecutorAttached,
    Resume,
    SetTenants,
    StepFinished,
    Submit,
    Tick,
)
from paceline_scheduler.core.executor.state import StepInFlight
from paceline_scheduler.core.executors import ExecutorDescription, Placement, Snapshot
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.request import Request
from paceline_scheduler.errors import RecordingError, SchedulerError
from paceline_scheduler.recording.replay import Recording, ReplayObserver, replay
from paceline_scheduler.recording.wire import RecordedEvent

_MAX_EXTRA_S = 600.0  # that a simulation may go on after the last recorded event
_NS = 1e9
_DONE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class Tally:
    """A ReplayObserver that measures what clients would have seen. Times are in seconds."""

    first_tokens_s: list[float] = field(default_factory=list)
    intervals_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_preemptions: int = 0
    num_refusals: int = 0
    num_steps: int = 0
    first_token_at_s: float | None = None
    last_token_at_s: float = 0.0

    def saw(self, core: Core, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        del core
        if isinstance(event, StepFinished):
            self.num_steps += 1
            self.num_preemptions += effects.reply.num_preempted
        for tokens in effects.outputs.tokens:
            self.num_tokens += len(tokens.token_ids)
            if len(tokens.token_ids):
                self.first_token_at_s = now if self.first_token_at_s is None else self.first_token_at_s
                self.last_token_at_s = now
            self.first_tokens_s += tokens.first_tokens_s.values()
            if len(tokens.intervals_s):
                known = ~np.isnan(tokens.intervals_s) & (tokens.num_tokens > 0)
                counts = tokens.num_tokens[known]
                self.intervals_s += np.repeat(tokens.intervals_s[known] / counts, counts).tolist()
        for ended in effects.ended:
            if ended.reason in _DONE and ended.times is not None:
                self.whole_s.append(ended.times.total_s)

    def refused(self, core: Core, event: Event[Any], now: float, error: str) -> None:
        del core, now, error
        if isinstance(event, Submit | Resume):
            self.num_refusals += 1

    def planned(self, core: Core, address: str, now: float, plan: BatchPlan | None) -> None: ...

    @property
    def tokens_per_s(self) -> float:
        span_s = self.last_token_at_s - (self.first_token_at_s or 0.0)
        return self.num_tokens / span_s if span_s > 0 else 0.0


@dataclass(slots=True)
class Learned:
    """A ReplayObserver that remembers how long steps took, and what became of requests."""

    outputs: dict[RecordId, list[int]] = field(default_factory=dict)
    ends: dict[RecordId, EndedRequest] = field(default_factory=dict)
    num_drafts: int = 0
    num_right: int = 0
    _keys: dict[int, RecordId] = field(default_factory=dict)  # by handle
    _planned_s: dict[tuple[str, int], float] = field(default_factory=dict)
    _last_s: dict[str, float] = field(default_factory=dict)
    _steps: dict[str, list[tuple[float, float, float, float, float]]] = field(default_factory=dict)

    def saw(self, core: Core, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        for live in core.state.requests.all() if not isinstance(event, StepFinished | Tick) else ():
            self._keys[live.request.handle] = live.request.key
        if isinstance(event, StepFinished):
            self._learn(event, now, effects.reply)
        for tokens in effects.outputs.tokens:
            ends = np.cumsum(tokens.num_tokens)
            for handle, offset, count, end in zip(
                tokens.handles, tokens.offsets.tolist(), tokens.num_tokens.tolist(), ends.tolist(), strict=True
            ):
                known = self.outputs.setdefault(self._keys[handle], [])
                known[offset:] = tokens.token_ids[end - count : end].tolist()
        for ended in effects.ended:
            self.ends[ended.request.key] = ended

    def refused(self, core: Core, event: Event[Any], now: float, error: str) -> None: ...

    def planned(self, core: Core, address: str, now: float, plan: BatchPlan | None) -> None:
        del core
        if plan is not None:
            self._planned_s[address, plan.step_id] = now

    def _learn(self, event: StepFinished, now: float, step: StepInFlight) -> None:
        address, result = event.address, event.result
        planned_s = self._planned_s.pop((address, result.step_id), None)
        begun_s = max(self._last_s.get(address, 0.0), now if planned_s is None else planned_s)
        self._last_s[address] = now
        num_drafts = int(result.num_draft_tokens.sum())
        self.num_drafts += num_drafts
        if num_drafts:
            self.num_right += int(np.clip(result.num_accepted - 1, 0, result.num_draft_tokens).sum())
        if step.num_tokens and planned_s is not None:
            unused = int(step.num_drafts.sum()) - num_drafts
            sample = step.num_tokens - unused, step.num_pairs, num_drafts, now - begun_s, result.timings.busy_ns / _NS
            self._steps.setdefault(address, []).append(sample)

    def step_costs(self) -> "StepCosts":
        """Fit how long steps take. Raises RecordingError where there are too few."""
        samples = np.array([each for steps in self._steps.values() for each in steps], dtype=np.float64).reshape(-1, 5)
        if len(samples) < _MIN_STEPS:
            raise RecordingError(f"{len(samples)} steps are too few to learn their times from; {_MIN_STEPS} are enough")
        return StepCosts(_fit(samples[:, :3], samples[:, 3]), _fit(samples[:, :3], samples[:, 4]))

    @property
    def acceptance(self) -> float:
        return self.num_right / self.num_drafts if self.num_drafts else 0.0


_MIN_STEPS = 8
_FAR = 6.0  # of the median distance


def _fit(inputs: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Return base and slopes of least squares, twice: the second time without steps that were far from the first."""
    columns = np.column_stack((np.ones(len(inputs)), inputs))
    weights = _least_squares(columns, seconds)
    distance = np.abs(columns @ weights - seconds)
    near = distance <= _FAR * np.median(distance)
    return tuple(_least_squares(columns[near], seconds[near]).tolist())


def _least_squares(columns: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return weights of which none is below 0: what would be is left out, and the rest fitted again."""
    used = [index for index in range(columns.shape[1]) if columns[:, index].any()]
    weights = np.zeros(columns.shape[1])
    while used:
        found = np.linalg.lstsq(columns[:, used], seconds, rcond=None)[0]
        lowest = int(found.argmin())
        if found[lowest] >= 0:
            weights[used] = found
            break
        del used[lowest]
    return weights


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step, by base, token, pair and draft: from its beginning to its result, and on the device."""

    whole: tuple[float, ...]
    busy: tuple[float, ...]

    def seconds(self, num_tokens: int, num_pairs: int, num_drafts: int) -> tuple[float, float]:
        inputs = (1.0, num_tokens, num_pairs, num_drafts)
        whole_s, busy_s = (
            sum(weight * value for weight, value in zip(weights, inputs, strict=True))
            for weights in (self.whole, self.busy)
        )
        return max(whole_s, 1e-6), busy_s


@dataclass(slots=True)
class _Row:
    key: RecordId
    num_known: int
    num_computed: int
    output: list[int]  # all that it will be
    num_output: int
    finish: RowFinish
    is_over: bool = False
    right: float = 0.0  # drafts that are owed


class SimulatedExecutor:
    """Answers plans in order, each after its time, with the outputs of the recording."""

    def __init__(self, description: ExecutorDescription, learned: Learned, costs: StepCosts) -> None:
        self.description = description
        self._learned = learned
        self._costs = costs
        self._rows: dict[int, _Row] = {}
        self._grant_hash = HASH_START
        self._free_s = 0.0

    def run(self, plan: BatchPlan, now: float) -> tuple[float, StepResult]:
        """Return when the result of a plan that is sent now arrives, and the result."""
        for release in plan.releases:
            self._rows.pop(release.row, None)
        for new in plan.new_requests:
            assert isinstance(new, Placement), "the core writes no others"
            self._rows[new.row] = self._row(new)
        self._grant_hash = grant_hash(grant_hash(self._grant_hash, plan.grants), plan.shared)
        drafts = plan.num_draft_tokens if len(plan.num_draft_tokens) else np.zeros_like(plan.rows)
        token_ids: list[int] = []
        accepted: list[int] = []
        verified: list[int] = []
        num_tokens = num_pairs = 0
        for row, count, num_drafts in zip(
            plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), drafts.tolist(), strict=True
        ):
            drawn, tried, begin = self._advance(self._rows[row], count, num_drafts)
            used = count - (num_drafts - tried)
            num_tokens += used
            num_pairs += used * begin + used * (used + 1) // 2
            token_ids += drawn
            accepted.append(len(drawn))
            verified.append(tried)
        whole_s, busy_s = self._costs.seconds(num_tokens, num_pairs, sum(verified)) if num_tokens else (1e-4, 0.0)
        self._free_s = max(now, self._free_s) + whole_s
        return self._free_s, StepResult(
            incarnation=plan.incarnation,
            epoch=plan.epoch,
            step_id=plan.step_id,
            rows=plan.rows,
            num_accepted=_column(accepted),
            token_ids=_column(token_ids),
            finishes=np.array([self._finish(row) for row in plan.rows.tolist()], dtype=np.uint8),
            grant_hash=self._grant_hash,
            timings=StepTimings(forward_ns=round(busy_s * _NS)),
            num_draft_tokens=_column(verified) if len(plan.num_draft_tokens) else plan.num_draft_tokens,
        )

    def _row(self, new: Placement) -> _Row:
        output, ended = self._learned.outputs.get(new.record_id, []), self._learned.ends.get(new.record_id)
        length = min(len(output) if ended is None else max(ended.num_output_tokens, 1), new.max_tokens)
        length = max(length, len(new.output_token_ids) + 1, 1)
        whole = (output + [0] * length)[:length]
        return _Row(
            key=new.record_id,
            num_known=len(new.prompt_token_ids) + len(new.output_token_ids),
            num_computed=new.num_cached_tokens,
            output=whole,
            num_output=len(new.output_token_ids),
            finish=RowFinish.LENGTH if length >= new.max_tokens else RowFinish.END_TOKEN,
        )

    def _advance(self, row: _Row, count: int, num_drafts: int) -> tuple[list[int], int, int]:
        """Return the tokens that a row draws, the drafts that were verified, and where it began."""
        begin = row.num_computed
        if row.is_over:
            return [], 0, begin
        row.num_computed += count - num_drafts
        if row.num_computed < row.num_known:
            return [], 0, begin
        row.right += num_drafts * self._learned.acceptance
        right = min(int(row.right), num_drafts)
        row.right -= right
        drawn = row.output[row.num_output : row.num_output + 1 + right]
        row.num_output += len(drawn)
        row.num_known += len(drawn)
        row.num_computed = row.num_known - 1
        row.is_over = row.num_output >= len(row.output)
        return drawn, num_drafts, begin

    def _finish(self, row: int) -> int:
        found = self._rows[row]
        return found.finish if found.is_over else RowFinish.GOES_ON


def _column(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def simulate(recording: Recording, learned: Learned, limits: CoreLimits, observer: ReplayObserver) -> bool:
    """Run a core with these bounds over the recorded arrivals; returns whether all requests came to an end."""
    return _Simulation(learned, learned.step_costs(), limits, observer).run(list(_arrivals(recording)))


class _Simulation:
    """A core, its executors and what is to happen when."""

    def __init__(self, learned: Learned, costs: StepCosts, limits: CoreLimits, observer: ReplayObserver) -> None:
        self._core = Core(limits)
        self._learned = learned
        self._costs = costs
        self._observer = observer
        self._executors: dict[str, SimulatedExecutor] = {}
        self._coming: list[tuple[float, int, Event[Any]]] = []
        self._number = 0
        self._results: dict[str, deque[float]] = {}
        self._wake_s: float | None = None

    def run(self, arrivals: list[tuple[float, Event[Any]]]) -> bool:
        for at_s, event in arrivals:
            self._push(at_s, event)
        end_s = max((at_s for at_s, _ in arrivals), default=0.0) + _MAX_EXTRA_S
        while self._coming:
            at_s, _, event = heapq.heappop(self._coming)
            if at_s > end_s:
                return False
            if self._wake_s is not None and self._wake_s <= at_s:
                self._happen(self._wake_s, Tick())
            self._happen(at_s, event)
        return not len(self._core.state.requests)

    def _push(self, at_s: float, event: Event[Any]) -> None:
        self._number += 1
        heapq.heappush(self._coming, (at_s, self._number, event))

    def _happen(self, now: float, event: Event[Any]) -> None:
        if isinstance(event, ExecutorAttached):
            executor = SimulatedExecutor(event.description, self._learned, self._costs)
            self._executors[event.description.address] = executor
        try:
            effects = self._core.apply(event, now)
        except SchedulerError as error:
            self._observer.refused(self._core, event, now, type(error).__name__)
            return
        self._observer.saw(self._core, event, now, effects)
        self._wake_s = effects.wake_at if effects.wake_at is None else max(effects.wake_at, now + 1e-3)
        for address in effects.executors_to_plan:
            while (plan := self._core.plan(address, now)) is not None:
                self._observer.planned(self._core, address, now, plan)
                at_s, result = self._executors[address].run(plan, now)
                self._push(at_s, StepFinished(address, result))


def _arrivals(recording: Recording) -> Iterator[tuple[float, Event[Any]]]:
    """Yield what came from outside: executors when they were attached first, and requests when they were sent first."""
    begin = recording.fresh_core().state
    first_s = next((each.now for each in recording.records if isinstance(each, RecordedEvent)), 0.0)
    seen: set[object] = set()
    yield first_s, SetTenants(begin.tenants.bounds)
    for executor in begin.executors:
        seen.add(executor.description.address)
        yield first_s, ExecutorAttached(_anew(executor.description), Snapshot())
    for live in begin.requests.all():
        if live.final is None:
            seen.add(live.request.key)
            yield first_s, Submit((live.request,))
    for record in recording.records:
        if isinstance(record, RecordedEvent):
            for event in _outside(record.event, seen):
                yield record.now, event


def _outside(event: Event[Any], seen: set[object]) -> Iterator[Event[Any]]:
    match event:
        case ExecutorAttached(description, snapshot):
            if description.address not in seen:
                seen.add(description.address)
                yield ExecutorAttached(_anew(description), Snapshot())
            for number, row in enumerate(snapshot.rows):
                context = row.request_context
                if context is not None and row.released is None and row.record_id not in seen:
                    seen.add(row.record_id)
                    request = replace(context.request, handle=-number - 1, model=description.model)
                    yield Submit((replace(request, prompt_token_ids=row.prompt_token_ids),))
        case Submit(requests):
            yield from _submitted(requests, seen)
        case Resume(resumptions):
            yield from _submitted(tuple(each.request for each in resumptions), seen)
        case Cancel() | SetTenants():
            yield event


def _submitted(requests: tuple[Request, ...], seen: set[object]) -> Iterator[Submit]:
    fresh = tuple(request for request in requests if request.key not in seen)
    seen.update(request.key for request in fresh)
    if fresh:
        yield Submit(fresh)


def _anew(description: ExecutorDescription) -> ExecutorDescription:
    return replace(description, failed_step=None)


# Settings, and what is shown


def read_policy(text: str, limits: CoreLimits) -> CoreLimits:
    """Return bounds with the named ones changed. Raises RecordingError for what is none."""
    known = [each.name for each in fields(CoreLimits)]
    try:
        wanted = json.loads(text if text.lstrip().startswith("{") else Path(text).read_bytes())
    except OSError as error:
        raise RecordingError(f"--policy: cannot read {text}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RecordingError(f'--policy: {error}; write JSON such as {{"itl_budget_s": 0.1}}') from error
    if not isinstance(wanted, dict):
        raise RecordingError('--policy: is no JSON object; write one such as {"itl_budget_s": 0.1}')
    for name, value in wanted.items():
        if name not in known:
            raise RecordingError(f"--policy: there is no setting {name!r}; there are {', '.join(known)}")
        is_whole = name.startswith(("max_num", "max_plans"))
        is_number = type(value) is int or (type(value) is float and not is_whole)
        if not is_number or value < 0 or (value == 0 and name != "max_num_draft_tokens"):
            raise RecordingError(f"--policy: {name} has to be a {'whole ' * is_whole}number above 0, and is {value!r}")
    return replace(limits, **wanted)


def compare(recording: Recording, policy: str, plot: Path | None) -> str:
    """Return a table of what was, what the simulation makes of it, and what it makes of other settings.

    Raises RecordingError.
    """
    recorded, learned = Tally(), Learned()
    limits = recording.fresh_core().state.limits
    other = read_policy(policy, limits)
    done = replay(recording, [recorded, learned])
    if done.difference is not None:
        raise RecordingError("this program repeats the recording otherwise, so it cannot say what would have been")
    columns: dict[str, Tally] = {"recorded": recorded}
    notes = []
    for name, bounds in (("simulated", limits), ("simulated, with the policy", other)):
        columns[name] = Tally()
        if not simulate(recording, learned, bounds, columns[name]):
            notes.append(f"{name}: not all requests came to an end")
    if plot is not None:
        from paceline_scheduler.recording.plots import draw  # needs what servers do not

        draw(columns, plot)
        notes.append(f"the picture is in {plot}")
    return "\n".join((*_table(columns), *notes, _HONESTY))


_HONESTY = (
    "simulated: the real core on a model of the executors (least squares over the recorded steps), without faults;\n"
    "trust it as far as the second column is like the first"
)


def _table(columns: Mapping[str, Tally]) -> Iterator[str]:
    yield " " * 28 + "".join(f"{name:>28}" for name in columns)
    for name, number in _rows():
        yield f"{name:<28}" + "".join(f"{number(tally):>28}" for tally in columns.values())


def _rows() -> Iterator[tuple[str, Any]]:
    for name, attribute in (
        ("first token", "first_tokens_s"),
        ("between tokens", "intervals_s"),
        ("whole request", "whole_s"),
    ):
        for share in (50, 99):
            yield f"{name}, p{share} (ms)", lambda tally, of=attribute, at=share: _percentile(getattr(tally, of), at)
    yield "tokens per second", lambda tally: f"{tally.tokens_per_s:,.1f}"
    yield "steps", lambda tally: f"{tally.num_steps:,}"
    yield "requests with an end", lambda tally: f"{len(tally.whole_s):,}"
    yield "preemptions", lambda tally: f"{tally.num_preemptions:,}"
    yield "refusals", lambda tally: f"{tally.num_refusals:,}"


def _percentile(seconds: list[float], share: int) -> str:
    return f"{np.percentile(seconds, share) * 1e3:,.2f}" if seconds else "-"
