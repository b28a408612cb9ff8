"""What one step may take on, in tokens and in predicted time."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from paceline.plan.values import Int32Array
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning.step_time import StepTimeModel, num_chunk_pairs

MIN_CHUNK = 16
"""Tokens of a prompt that a step computes beside decodes, even beyond its target."""


class StepBudget:
    """What a step may still take on, in tokens and in predicted time."""

    def __init__(
        self, step_time: StepTimeModel, limits: CoreLimits, max_num_tokens: int, graph_tokens: Sequence[int] = ()
    ) -> None:
        """graph_tokens: the sizes of captured steps, ascending: a step of one token more costs as much as the next."""
        self.num_tokens = 0
        self.num_pairs = 0
        self.num_reserved = 0  # tokens that drafts leave to prompts
        self._step_time = step_time
        self._limits = limits
        self.max_num_tokens = max_num_tokens
        self._target_ns = limits.max_step_s * 1e9
        self._graph_tokens = graph_tokens
        self._num_chunk_tokens = 0
        self._is_full = False

    def add_decodes(self, positions: Int32Array, max_num_decodes: int) -> int:
        """Take one token at each position, as many as fit but at least one, in place of the last call's; returns how
        many.
        """
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

    def add_drafts(self, positions: Int32Array, wanted: Int32Array) -> Int32Array:
        """Take drafts behind the decodes at these positions, in order; returns how many each got."""
        room = self.max_num_tokens - self.num_reserved - self.num_tokens
        drafts = wanted - np.clip(np.cumsum(wanted) - room, 0, wanted)
        num_tokens = self.num_tokens + int(drafts.sum())
        num_pairs = self.num_pairs + int((drafts * (positions + 1) + drafts * (drafts + 1) // 2).sum())
        predicted_ns = self._step_time.predict_ns(num_tokens, num_pairs)
        if predicted_ns > self._limits.max_step_s * 1e9:
            return np.zeros_like(drafts)
        self.num_tokens, self.num_pairs = num_tokens, num_pairs
        self._target_ns = self._limits.mixed_step_s(predicted_ns / 1e9) * 1e9
        return drafts

    def add_chunk(self, start: int, wanted: int) -> int:
        """Take up to `wanted` tokens from position `start`; returns how many. The first chunk may exceed the target a
        little, else prompts would starve behind decodes; only a lone token may exceed `max_step_s`.
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
        """Return what is left of a chunk that does not end its prompt if the step is to fill a captured one: the
        largest below. Prompts are never left with less than half, nor than MIN_CHUNK.
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
        return int(self._step_time.predict_ns(self.num_tokens, self.num_pairs))
