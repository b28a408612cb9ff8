"""Which of several executors of a model a waiting request is meant for.

One queue serves them all. An executor that plans leaves a request to another one that has room too and would bring it
further sooner, for its cache or its load.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.planning.capacity import Blocker, Capacity, ExecutorView, Fit
from paceline_scheduler.core.planning.forecast import Load, load_of, prefill_s

_NUM_TOKENS_COMPARED = 32
"""Its first tokens count as well as the first one, so that decodes spread out."""

MAX_LEFT_S = 0.5
"""Then whoever can takes it: forecasts might go back and forth."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    view: ExecutorView
    room: Capacity
    load: Load


class Dispatch:
    def __init__(self, address: str, views: Mapping[str, ExecutorView], limits: CoreLimits, now: float) -> None:
        self._address = address
        self._views = views
        self._limits = limits
        self._now = now
        self._tokens_meant = dict.fromkeys(views, 0)

    def is_for_others(self, live: LiveRequest) -> bool:
        """Also counts the request in at the other executor."""
        if live.left_since_s is not None and self._now - live.left_since_s > MAX_LEFT_S:
            return False
        fits = {address: candidate.room.fit(live) for address, candidate in self._candidates.items()}
        if any(isinstance(fit, Blocker) and fit.is_brief for fit in fits.values()):
            return True
        found = {address: fit for address, fit in fits.items() if isinstance(fit, Fit)}
        if not found:
            return False
        best = min(found, key=lambda address: (self._cost_s(address, live, found[address]), address))
        self._candidates[best].room.take(live, found[best])
        self._tokens_meant[best] += live.num_known_tokens - found[best].num_cached_tokens
        return best != self._address

    @cached_property
    def _candidates(self) -> dict[str, _Candidate]:
        return {
            address: _Candidate(
                view, Capacity(view, view.pool.num_available, self._limits), load_of(view, self._limits)
            )
            for address, view in self._views.items()
        }

    def _cost_s(self, address: str, live: LiveRequest, fit: Fit) -> float:
        candidate = self._candidates[address]
        view, load = candidate.view, candidate.load
        prefill = prefill_s(view, load, fit.num_cached_tokens, live.num_known_tokens)
        num_running = candidate.room.num_running + 1
        step_s = view.step_time.predict_ns(num_running, num_running * live.num_known_tokens) / 1e9
        token_s = step_s / view.speculation.speedup
        # What is meant for it comes first there.
        backlog_s = load.backlog_s + self._tokens_meant[address] / load.prefill_tokens_per_s
        return backlog_s + prefill + _NUM_TOKENS_COMPARED * token_s
