"""Feeds a fresh core with what a recording holds and compares what it plans. Knows no bytes, and prints nothing."""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.plan.values import BatchPlan
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import Effects, Event, ExecutorAttached, StepFinished
from paceline_scheduler.core.executors import Snapshot
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.errors import RecordingError, SchedulerError
from paceline_scheduler.recording import wire
from paceline_scheduler.recording.wire import (
    Header,
    Record,
    RecordedEvent,
    RecordedKeys,
    RecordedPlan,
    RecordedPlanning,
    TokenForm,
)

_MAX_SHOWN = 300  # characters of a field
PlanValue = Any  # or one of its fields'


class ReplayObserver(Protocol):
    """Sees what the core is fed and answers; `core` is as it is after that."""

    def saw(self, core: Core, event: Event[Any], now: float, effects: Effects[Any]) -> None: ...

    def refused(self, core: Core, event: Event[Any], now: float, error: str) -> None: ...

    def planned(self, core: Core, address: str, now: float, plan: BatchPlan | None) -> None: ...


class Follower(ReplayObserver, Protocol):
    """Looks at one recording after another. `core` is as one of them begins."""

    def begin(self, core: Core, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that the core did otherwise. `step_id` is that of a plan, None of an event."""

    now: float
    address: str
    step_id: int | None
    sentences: tuple[str, ...]


@dataclass(slots=True)
class ReplayResult:
    num_events: int = 0
    num_plans: int = 0
    num_refusals: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    header: Header
    records: tuple[Record, ...]  # beginning with the core's state

    def fresh_core(self) -> Core:
        """As it was at the beginning. Raises RecordingError."""
        state = deepcopy(self.records[0])
        assert isinstance(state, CoreState), "it was looked at when the file was read"
        try:
            for executor in state.executors:
                executor.ledger.pool.rename(self.stand_ins)
            return Core.of(state)
        except Exception as error:  # a state that lacks something may break anywhere
            raise RecordingError(f"the recording begins with a state that cannot be: {error}") from error

    @property
    def first_s(self) -> float | None:
        """Of the scheduler's clock; None without events."""
        times = (record.now for record in self.records if isinstance(record, RecordedEvent | RecordedPlanning))
        return next(times, None)

    @property
    def stand_ins(self) -> dict[bytes, bytes]:
        """The keys by which a core with stand-ins knows the blocks that snapshots name."""
        found: dict[bytes, bytes] = {}
        for record in self.records:
            if isinstance(record, RecordedKeys):
                found |= record.stand_ins
        return found


def read_recording(path: Path) -> Recording:
    """Raises RecordingError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror or error}") from error
    records = tuple(wire.decode(data))
    if len(records) < 2 or not isinstance(records[0], Header) or not isinstance(records[1], CoreState):
        raise RecordingError(f"{path} ends before anything that could be repeated")
    return Recording(records[0], records[1:])


def replay(recording: Recording, observers: Sequence[ReplayObserver] = (), *, core: Core | None = None) -> ReplayResult:
    """Feed a fresh core, or a given one, up to the first difference. Raises RecordingError."""
    form, stand_ins = recording.header.token_form, recording.stand_ins
    core = core or recording.fresh_core()
    done = ReplayResult(first_s=recording.first_s)
    for record in recording.records[1:]:
        if isinstance(record, RecordedEvent | RecordedPlanning):
            done.last_s = record.now
        try:
            match record:
                case RecordedEvent():
                    done.num_events += 1
                    done.difference = _feed(core, record, stand_ins, form, observers)
                    done.num_refusals += bool(record.refusal)
                case RecordedPlanning():
                    done.num_plans += record.recorded is not None
                    done.difference = _plan(core, record, form, observers)
        except Exception as error:  # whoever looks at a core in a state that cannot be may break as well
            raise RecordingError(f"the recording holds what cannot be: {type(error).__name__} {error}") from error
        if done.difference is not None:
            break
    return done


def follow(recordings: Iterable[Recording], follower: Follower) -> tuple[float, list[ReplayResult]]:
    """Replay the files of one scheduler, without a gap; also returns when the first begins. Raises RecordingError."""
    first_s, done, before = 0.0, list[ReplayResult](), None
    for recording in recordings:
        header = recording.header
        if before is None:
            first_s = recording.first_s or 0.0
        elif header.scheduler_id != before.scheduler_id:
            raise RecordingError("the files are of several schedulers; name those of one")
        elif (header.begun_unix_s, header.number) < (before.begun_unix_s, before.number):
            raise RecordingError("the files are not in the order of their times; name the oldest first")
        elif header.number > before.number + 1:
            raise RecordingError(f"files {before.number + 1} to {header.number - 1} are missing between two of them")
        before = header
        core = recording.fresh_core()
        follower.begin(core, first_s if recording.first_s is None else recording.first_s)
        done.append(replay(recording, [follower], core=core))
    return first_s, done


def _feed(
    core: Core,
    record: RecordedEvent,
    stand_ins: dict[bytes, bytes],
    form: TokenForm,
    observers: Iterable[ReplayObserver],
) -> Difference | None:
    event, now = _with_known_keys(record.event, stand_ins), record.now
    if record.refusal and form is TokenForm.STAND_INS and isinstance(event, StepFinished):
        return None  # without its tokens nothing says why
    address = event.address if isinstance(event, StepFinished) else ""
    try:
        effects = core.apply(event, now)
    except SchedulerError as error:
        if type(error).__name__ == record.refusal:
            for observer in observers:
                observer.refused(core, event, now, record.refusal)
            return None
        outcome = f"was refused now: {error}"
    except Exception as error:  # a core in a state that it was never in may break anywhere
        outcome = f"broke the core now: {type(error).__name__} {error}"
    else:
        if not record.refusal:
            for observer in observers:
                observer.saw(core, event, now, effects)
            return None
        outcome = "was taken now"
    before = f"refused with {record.refusal}" if record.refusal else "taken"
    step_id = event.result.step_id if isinstance(event, StepFinished) else None
    return Difference(now, address, step_id, (f"{type(event).__name__}, which was {before}, {outcome}",))


def _plan(
    core: Core, record: RecordedPlanning, form: TokenForm, observers: Iterable[ReplayObserver]
) -> Difference | None:
    address, now, recorded = record.address, record.now, record.recorded
    try:
        plan = core.plan(address, now)
    except Exception as error:
        step_id = None if recorded is None else recorded.plan.step_id
        return Difference(now, address, step_id, (f"the core broke: {type(error).__name__} {error}",))
    again = None if plan is None else wire.recorded_plan(plan, form)
    sentences = tuple(_differences(recorded, again))
    if sentences:
        found = recorded or again
        assert found is not None, "two plannings without a plan do not differ"
        return Difference(now, address, found.plan.step_id, sentences)
    for observer in observers:
        observer.planned(core, address, now, plan)
    return None


def _with_known_keys(event: Event[Any], stand_ins: dict[bytes, bytes]) -> Event[Any]:
    if not (stand_ins and isinstance(event, ExecutorAttached)):
        return event
    snapshot = event.snapshot
    tags = type(snapshot.tags).of((block, stand_ins.get(key, key)) for block, key in snapshot.tags)
    return ExecutorAttached(event.description, Snapshot(snapshot.rows, tags))


def _differences(recorded: RecordedPlan | None, again: RecordedPlan | None) -> Iterator[str]:
    if recorded is None or again is None:
        if recorded is not again:
            yield f"then {_outlined(recorded)}; now {_outlined(again)}"
        return
    for field in fields(BatchPlan):
        before, now = getattr(recorded.plan, field.name), getattr(again.plan, field.name)
        if _plain(before) != _plain(now):
            yield f"{field.name}: then {_shown(before)}; now {_shown(now)}"
    if recorded.digest != again.digest:
        yield "what its new requests bring along: the bytes differ (tokens, sampling or context)"


def _outlined(found: RecordedPlan | None) -> str:
    if found is None:
        return "no plan"
    plan = found.plan
    return f"step {plan.step_id} with {len(plan.rows)} rows, {plan.num_tokens} tokens"


def _plain(value: PlanValue) -> PlanValue:
    """Return a value of a plan as one that can be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if hasattr(value, "__slots__") and not isinstance(value, int):
        names = [field.name for field in fields(value)]
        return tuple(_plain(getattr(value, name)) for name in names)
    return value


def _shown(value: PlanValue) -> str:
    text = str(_plain(value))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
