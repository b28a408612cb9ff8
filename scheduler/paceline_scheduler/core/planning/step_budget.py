"""What one step may take on, in tokens and in predicted time."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.plan.values import Int32Array
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning.step_time import StepTimeModel, num_chunk_pairs

Float64Array = npt.NDArray[np.float64]

MIN_CHUNK = 16
"""A prompt beside decodes gets so many tokens even beyond the target."""


class StepBudget:
    def __init__(
        self, step_time: StepTimeModel, limits: CoreLimits, max_num_tokens: int, graph_tokens: Sequence[int] = ()
    ) -> None:
        """graph_tokens: sizes of captured steps, ascending: one token more costs as much as the next size."""
        self.num_tokens = 0
        self.num_pairs = 0
        self._num_drafts = 0
        self._drafting_ns = 0.0
        self._step_time = step_time
        self._limits = limits
        self.max_num_tokens = max_num_tokens
        self._target_ns = limits.max_step_s * 1e9
        self._graph_tokens = graph_tokens
        self._num_chunk_tokens = 0
        self._is_full = False

    def add_decodes(self, positions: Int32Array, max_num_decodes: int) -> int:
        """As many as fit but at least one, in place of the last call's; returns how many."""
        fitting = min(len(positions), max_num_decodes)
        if not fitting:
            return 0
        num_pairs = int(positions[:fitting].sum()) + fitting
        max_ns = self._limits.max_step_s * 1e9
        if self._step_time.predict_ns(fitting, num_pairs) > max_ns:
            fitting, num_pairs = self._step_time.max_decodes_within(max_ns, positions[:fitting])
        self.num_tokens, self.num_pairs = fitting, num_pairs
        decodes_s = self._step_time.predict_ns(fitting, num_pairs) / 1e9
        self._target_ns = self._limits.mixed_step_s(decodes_s) * 1e9
        return fitting

    @property
    def room(self) -> int:
        return self.max_num_tokens - self.num_tokens

    @property
    def target_ns(self) -> float:
        return self._target_ns

    def draft_costs(self, positions: Int32Array, num_places: int) -> Float64Array:
        return self._step_time.draft_costs(positions, num_places)

    def add_drafts(self, positions: Int32Array, wanted: Int32Array, round_ns: float) -> Int32Array:
        """Returns how many each position got. No prompt is computed beside them. `round_ns` is what one more draft of a
        row takes.
        """
        drafts: Int32Array = wanted - np.clip(np.cumsum(wanted) - self.room, 0, wanted)
        num_drafts, drafting_ns = int(drafts.sum()), round_ns * int(drafts.max(initial=0))
        num_tokens = self.num_tokens + num_drafts
        num_pairs = self.num_pairs + int((drafts * (positions + 1) + drafts * (drafts + 1) // 2).sum())
        if self._step_time.predict_ns(num_tokens, num_pairs, num_drafts) + drafting_ns > self._target_ns:
            return np.zeros_like(drafts)
        self.num_tokens, self.num_pairs = num_tokens, num_pairs
        self._num_drafts, self._drafting_ns = num_drafts, drafting_ns
        return drafts

    def add_chunk(self, start: int, wanted: int) -> int:
        """Returns how many tokens were taken. The first chunk may exceed the target a little, else prompts would
        starve; only a lone token may exceed `max_step_s`.
        """
        room = min(wanted, self.max_num_tokens - self.num_tokens)
        if room <= 0 or self._is_full:
            return 0
        spent = (self.num_tokens, self.num_pairs)
        count = self._step_time.max_tokens_within(self._target_ns, spent, start, room)
        least = min(MIN_CHUNK, room)
        if count < least and not self._num_chunk_tokens:
            count = self._step_time.max_tokens_within(self._limits.max_step_s * 1e9, spent, start, least)
            count = max(count, 1 if self.num_tokens == 0 else 0)
        if count < wanted:
            count = self._filling_a_graph(count)
        self._num_chunk_tokens += count
        self.num_tokens += count
        self.num_pairs += num_chunk_pairs(start, count)
        return count

    def _filling_a_graph(self, count: int) -> int:
        """Shortens a chunk that does not end its prompt to fill the captured step below. Prompts keep half, and
        MIN_CHUNK.
        """
        below = bisect_right(self._graph_tokens, self.num_tokens + count)
        filling = self._graph_tokens[below - 1] - self.num_tokens if below else -1
        before = self._num_chunk_tokens + count
        least = max(before // 2, min(MIN_CHUNK, before))
        if filling < 0 or filling == count or self._num_chunk_tokens + filling < least:
            return count
        self._is_full = True
        return filling

    def predicted_ns(self) -> int:
        return int(self._step_time.predict_ns(self.num_tokens, self.num_pairs, self._num_drafts) + self._drafting_ns)
