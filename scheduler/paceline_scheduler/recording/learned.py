"""What a recording teaches: how long its executors' steps took, and what became of its requests.

A step takes as long as least squares over the recorded ones say of its tokens, pairs and drafts. Refuses to know what
that is asked for.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.plan.values import BatchPlan, RecordId
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.ended import EndedRequest
from paceline_scheduler.core.events import Effects, Event, StepFinished, Tick
from paceline_scheduler.core.executor.attachment import StepInFlight
from paceline_scheduler.errors import RecordingError

_MIN_STEPS = 8
_FAR = 6.0  # of the median distance
_NS = 1e9


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
class Learned:
    """A ReplayObserver."""

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
        for tokens in effects.tokens:
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

    def step_costs(self) -> StepCosts:
        """Raises RecordingError where there are too few steps."""
        samples = np.array([each for steps in self._steps.values() for each in steps], dtype=np.float64).reshape(-1, 5)
        if len(samples) < _MIN_STEPS:
            raise RecordingError(f"{len(samples)} steps are too few to learn their times from; {_MIN_STEPS} are enough")
        return StepCosts(_fit(samples[:, :3], samples[:, 3]), _fit(samples[:, :3], samples[:, 4]))

    @property
    def acceptance(self) -> float:
        return self.num_right / self.num_drafts if self.num_drafts else 0.0


def _fit(inputs: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Base and slopes of least squares, fitted again without steps far from the first."""
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
