"""Which of several executors of a model a waiting request is meant for.

One queue serves them all. An executor that plans leaves a request to another one that has room too and would bring it
further sooner, for its cache or its load. Among few executors that is asked anew in every plan. Among many it is asked
once: then the request is left alone until the one it is meant for has planned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest, Meant
from paceline_scheduler.core.planning.capacity import Blocker, Capacity, ExecutorView, Fit, num_cached_on
from paceline_scheduler.core.planning.forecast import Pace, pace_of, prefill_s
from paceline_scheduler.core.planning.step_time import Float64Array, Int64Array, StepTimes

_NUM_TOKENS_COMPARED = 32
"""Its first tokens count as well as the first one, so that decodes spread out."""

MAX_ASKED_ANEW = 4
"""Of so many executors all choose anew in each plan, as what they know changes in each step."""


_MAX_WITHOUT_ROOM = 256


@dataclass(frozen=True, slots=True)
class Known:
    """What was found of an executor, for as long as nothing happens to it: as its state says, so it is none itself."""

    version: tuple[int, ...]
    pace: Pace
    without_room: set[LiveRequest] = field(default_factory=set)  # it has none for these


KnownExecutors = dict[str, Known]
"""By address."""


class _Candidates:
    """Executors by address, with what is meant for each counted in. Element i of each column is of `views[i]`."""

    def __init__(self, views: Sequence[ExecutorView], limits: CoreLimits, known: KnownExecutors) -> None:
        self.views = sorted(views, key=lambda view: view.description.address)
        self.index = {view.description.address: index for index, view in enumerate(self.views)}
        self._limits = limits
        self._times = StepTimes([view.step_time for view in self.views])
        self._speedup = np.array([view.speculation.speedup for view in self.views])
        self._known = [_known_of(view, limits, known) for view in self.views]
        columns = np.array([each.pace for each in self._known])
        self._prefill_tokens_per_s, self._backlog_s = columns[:, 0], columns[:, 1]
        self._num_running = columns[:, 2].astype(np.int64)
        self._num_free = [view.rows.num_free for view in self.views]
        self._num_tokens_meant = np.zeros(len(self.views), dtype=np.int64)
        self._taking: set[int] = set()
        self._to_take: dict[int, list[LiveRequest]] = {}
        self._rooms: dict[int, Capacity] = {}

    def fit(self, index: int, live: LiveRequest) -> Fit | Blocker:
        return self._room(index).fit(live)

    def quickest(self, live: LiveRequest, num_cached: Sequence[int]) -> tuple[int, Fit] | None:
        """Of those that have room for it, the first by address."""
        costs_s = self._costs_s(live.num_known_tokens, np.array(num_cached))
        for index in costs_s.argsort(kind="stable").tolist():
            without_room = self._known[index].without_room
            if not self._num_free[index] or live in without_room:
                continue
            fit = self._room(index).fit(live)
            if isinstance(fit, Fit):
                return index, fit
            if index not in self._taking and len(without_room) < _MAX_WITHOUT_ROOM:
                without_room.add(live)
        return None

    def take(self, index: int, live: LiveRequest, num_tokens: int, fit: Fit | None = None) -> None:
        """Without a fit one is found when somebody else asks for room there."""
        self._taking.add(index)
        self._num_tokens_meant[index] += num_tokens
        self._num_running[index] += 1
        self._num_free[index] = max(0, self._num_free[index] - 1)
        if fit is None:
            self._to_take.setdefault(index, []).append(live)
        else:
            self._room(index).take(live, fit)

    def _room(self, index: int) -> Capacity:
        room = self._rooms.get(index)
        if room is None:
            room = self._rooms[index] = Capacity(self.views[index], self._limits)
        for live in self._to_take.pop(index, ()):
            room.take_if_fits(live)
        return room

    def _costs_s(self, num_known: int, num_cached: Int64Array) -> Float64Array:
        prefill = prefill_s(self._times, self._prefill_tokens_per_s, num_cached, num_known)
        num_running = self._num_running + 1
        token_s = self._times.predict_ns(num_running, num_running * num_known) / 1e9 / self._speedup
        # What is meant for it comes first there.
        backlog_s = self._backlog_s + self._num_tokens_meant / self._prefill_tokens_per_s
        costs_s: Float64Array = backlog_s + prefill + _NUM_TOKENS_COMPARED * token_s
        return costs_s


def _known_of(view: ExecutorView, limits: CoreLimits, executors: KnownExecutors) -> Known:
    known = executors.get(view.description.address)
    if known is None or known.version != view.version:
        known = executors[view.description.address] = Known(view.version, pace_of(view, limits))
    return known


class Dispatch:
    """`views` are of all executors that take requests, among them the one at `address`, which plans."""

    def __init__(
        self,
        address: str,
        views: Callable[[], Sequence[ExecutorView]],
        limits: CoreLimits,
        now: float,
        known: KnownExecutors,
    ) -> None:
        self.meant: dict[LiveRequest, Meant] = {}  # chosen in this plan for longer than it
        self._address = address
        self._views = views
        self._limits = limits
        self._now = now
        self._known = known
        self._meant_before: list[tuple[LiveRequest, Meant]] = []

    def count_in(self, live: LiveRequest, meant: Meant) -> None:
        """It was meant for somebody before, who is still there."""
        self._meant_before.append((live, meant))

    def is_for_others(self, live: LiveRequest) -> bool:
        """Also counts the request in at the other executor."""
        candidates = self._counted
        if len(candidates.views) < 2 or live.was_left_long(self._now):
            return False
        if live.request.num_completions > 1:
            fits = [candidates.fit(index, live) for index in range(len(candidates.views))]
            if any(isinstance(fit, Blocker) and fit.is_brief for fit in fits):
                return True
            num_cached = [fit.blocks.num_cached_tokens if isinstance(fit, Fit) else 0 for fit in fits]
        else:
            num_cached = num_cached_on(candidates.views, live)
        found = candidates.quickest(live, num_cached)
        if found is None:
            return False
        index, fit = found
        num_tokens = live.num_known_tokens - fit.blocks.num_cached_tokens
        candidates.take(index, live, num_tokens, fit)
        view = candidates.views[index]
        is_other = view.description.address != self._address
        if is_other and len(candidates.views) > MAX_ASKED_ANEW:
            self.meant[live] = Meant(view.description.address, view.num_plans, num_tokens)
        return is_other

    @cached_property
    def _candidates(self) -> _Candidates:
        return _Candidates(self._views(), self._limits, self._known)

    @property
    def _counted(self) -> _Candidates:
        for live, meant in self._meant_before:
            self._candidates.take(self._candidates.index[meant.address], live, meant.num_tokens)
        self._meant_before.clear()
        return self._candidates
