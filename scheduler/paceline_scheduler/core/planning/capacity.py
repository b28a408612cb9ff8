"""What keeps a waiting request off an executor now: the one place that knows, for planning and for explaining alike."""

from collections.abc import Iterable

from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.planning.resources import Blocker, Fit, resources_of
from paceline_scheduler.core.planning.shares import Shares
from paceline_scheduler.core.planning.view import ExecutorView, siblings

_COMPANY = 1.5  # what a step may take, in steps of the longest request alone, where those are slow
_AWAITS_PROMPT = "its prompt is being computed for another of its completions"
MAX_PLACED_TOKENS = 8192  # known ones in one plan: each is hashed, and looked up in the prefix cache
MAX_PLACED_BYTES = 8 << 20  # prompts and contexts of one plan, which is one message


class Capacity:
    """What is left for newcomers in one plan; `take` counts them in one by one."""

    def __init__(
        self, view: ExecutorView, limits: CoreLimits, shares: Shares | None = None, num_growing: int = 0
    ) -> None:
        self._view = view
        self._limits = limits
        self._resources = resources_of(view, limits, shares, num_growing)
        contexts = view.rows.num_scheduled[view.rows.running()]
        self.num_running = len(contexts)
        self._num_pairs, self._longest = int(contexts.sum()), int(contexts.max(initial=0))
        self._num_taken = 0
        self._num_placed_bytes = self._num_placed_tokens = 0
        self._new_groups: set[tuple[str, str]] = set()  # whose prompt is computed from here on

    @property
    def shortage(self) -> Blocker | None:
        """Why nobody has any."""
        return next(filter(None, (resource.shortage for resource in self._resources)), None)

    def could_ever_hold(self, live: LiveRequest) -> bool:
        return live.fits(self._view.description)

    def fit(self, live: LiveRequest) -> Fit | Blocker:
        """Changes nothing."""
        blocker = self._blocker(live)
        if blocker is not None:
            return blocker
        needs = []
        for resource in self._resources:
            need = resource.need(live)
            if isinstance(need, Blocker):
                return need
            needs.append(need)
        return Fit(*needs)

    def _blocker(self, live: LiveRequest) -> Blocker | None:
        """Without what depends on the request's resources."""
        address = self._view.description.address
        if not self.could_ever_hold(live):
            return Blocker(f"{address} can never hold it", is_own=True)
        if (shortage := self.shortage) is not None:
            return shortage
        step_s, allowed_s = self._step_s(live), self._allowed_step_s(live)
        if self.num_running and step_s > allowed_s:
            return Blocker(
                f"steps of {address} would take {step_s * 1e3:.0f} ms with it, "
                f"{allowed_s * 1e3:.0f} ms are allowed between tokens"
            )
        if self._num_taken and self._is_full(live):
            return Blocker(f"the next plan of {address} has no room for another prompt")
        if live.request.key in self._view.leaving_keys:
            return Blocker(f"an earlier request of this id is still leaving {address}")
        return Blocker(_AWAITS_PROMPT, is_own=True, is_brief=True) if self._awaits_prompt(live) else None

    def take(self, live: LiveRequest, fit: Fit) -> None:
        for resource, need in zip(self._resources, fit, strict=True):
            resource.take(live, need)
        self.num_running += 1
        self._num_pairs += live.num_known_tokens
        self._num_taken += 1
        self._num_placed_bytes += live.num_placed_bytes
        self._num_placed_tokens += live.num_known_tokens
        if live.request.num_completions > 1 and fit.blocks.num_cached_tokens < live.num_prompt_tokens - 1:
            self._new_groups.add(live.request.key.whole)

    def take_if_fits(self, live: LiveRequest) -> bool:
        fit = self.fit(live)
        if isinstance(fit, Blocker):
            return False
        self.take(live, fit)
        return True

    def give_back(self, rows: Iterable[int]) -> None:
        """What is on them leaves with this plan."""
        for resource in self._resources:
            resource.give_back(rows)

    def _is_full(self, live: LiveRequest) -> bool:
        num_bytes = self._num_placed_bytes + live.num_placed_bytes
        return num_bytes > MAX_PLACED_BYTES or self._num_placed_tokens + live.num_known_tokens > MAX_PLACED_TOKENS

    def _step_s(self, live: LiveRequest) -> float:
        num_pairs = self._num_pairs + live.num_known_tokens
        return self._view.step_time.predict_ns(self.num_running + 1, num_pairs) / 1e9

    def _allowed_step_s(self, live: LiveRequest) -> float:
        longest = max(self._longest, live.num_known_tokens)
        return max(self._limits.decode_only_step_s, _COMPANY * self._view.step_time.predict_ns(1, longest) / 1e9)

    def _awaits_prompt(self, live: LiveRequest) -> bool:
        if live.request.num_completions == 1 or live.computes_all:
            return False
        return live.request.key.whole in self._new_groups or any(
            self._view.rows.num_computed[row] < live.num_prompt_tokens for row in siblings(self._view, live)
        )
