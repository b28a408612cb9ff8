"""Requests on a simulated executor: on a row, and as the record that stays when they left it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.values import (
    FinalRelease,
    Int32Array,
    LogprobColumns,
    NewRequest,
    RowFinish,
    TokenLogprobs,
)
from paceline_scheduler.core.executors import Placement, SeenRow
from paceline_scheduler.simulator.blocks import BlockTable
from paceline_scheduler.simulator.tokens import TokenRule


@dataclass(frozen=True, slots=True)
class SimulatedRecord:
    """A request that left its row. `released` is None after a preemption."""

    state: SeenRow

    @property
    def attempt(self) -> int:
        """That of the placement it had."""
        return self.state.attempt

    @property
    def released(self) -> FinalRelease | None:
        """How it ended, if it did."""
        return self.state.released

    @property
    def output_token_ids(self) -> Int32Array:
        """What it has generated."""
        return self.state.output_token_ids

    def snapshot(self) -> SeenRow:
        """Return the record as an attaching scheduler sees it."""
        return self.state


class SimulatedRow:
    """A request on a row: its tokens, how many of them are computed, and its block table."""

    def __init__(self, placement: NewRequest, max_model_len: int) -> None:
        self.placement = placement
        self.key = placement.record_id
        self.table = BlockTable(placement.row, self.key.tenant)
        self.finish = RowFinish.GOES_ON
        self.num_computed_tokens = placement.num_cached_tokens
        self.logprobs: list[TokenLogprobs] = []  # of tokens of this attempt, if they were asked for
        prompt, output = placement.prompt_token_ids, placement.output_token_ids
        self._max_model_len = max_model_len
        self._num_prompt_tokens = len(prompt)
        self._num_tokens = len(prompt) + len(output)
        self._tokens = np.zeros(max_model_len, dtype=np.int32)
        self._tokens[: self._num_tokens] = np.concatenate((prompt, output))

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self._num_tokens

    @property
    def num_output_tokens(self) -> int:
        """The output so far, earlier attempts included."""
        return self._num_tokens - self._num_prompt_tokens

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output at most; the last of them is never computed."""
        return min(self._num_prompt_tokens + self.placement.max_tokens, self._max_model_len)

    @property
    def token_ids(self) -> Int32Array:
        """Prompt and output so far."""
        return self._tokens[: self._num_tokens]

    def append(self, token_id: int) -> None:
        """Take a generated token, and end if it was the last one."""
        self._tokens[self._num_tokens] = token_id
        self._num_tokens += 1
        if token_id in self.placement.end_token_ids:
            self.finish = RowFinish.END_TOKEN
        elif self.num_output_tokens >= self.placement.max_tokens:
            self.finish = RowFinish.LENGTH
        elif self._num_tokens >= self._max_model_len:
            self.finish = RowFinish.CONTEXT_FULL

    def prompt_logprobs(self, start: int, rule: TokenRule) -> LogprobColumns | None:
        """Return those of the prompt's tokens that are predicted by what was computed from `start` on, if asked for."""
        num_top, tokens = self.placement.num_prompt_logprobs, self.token_ids
        first, end = start + 1, min(self.num_computed_tokens + 1, self._num_prompt_tokens)
        if num_top is None or first >= end:
            return None
        told = [rule.logprobs(int(tokens[position]), position, num_top) for position in range(first, end)]
        return columns_of(first, told, num_top)

    def record(self, released: FinalRelease | None) -> SimulatedRecord:
        """Return what stays when the row is released."""
        num_output_tokens = self.num_output_tokens if released is None else released.num_output_tokens
        return SimulatedRecord(self._state(None, num_output_tokens, released))

    def snapshot(self) -> SeenRow:
        """Return the row as an attaching scheduler sees it."""
        return self._state(self.placement.row, self.num_output_tokens, None)

    def _state(self, row: int | None, num_output_tokens: int, released: FinalRelease | None) -> SeenRow:
        first, is_record, placement = self._num_prompt_tokens, row is None, self.placement
        return SeenRow(
            record_id=self.key,
            row=row,
            attempt=placement.attempt,
            prompt_token_ids=self._tokens[:first].copy(),
            output_token_ids=self._tokens[first : first + num_output_tokens].copy(),
            num_computed_tokens=0 if is_record else self.num_computed_tokens,
            block_ids=np.array([] if is_record else self.table.block_ids, dtype=np.int32),
            finish=self.finish,
            released=released,
            context=placement.context,
            logprobs=self._logprobs_up_to(num_output_tokens),
            request_context=placement.request_context if isinstance(placement, Placement) else None,
        )

    def _logprobs_up_to(self, num_output_tokens: int) -> LogprobColumns | None:
        num_top, offset = self.placement.num_logprobs, len(self.placement.output_token_ids)
        if num_top is None:
            return None
        kept = self.logprobs[: max(0, num_output_tokens - offset)]
        return columns_of(min(offset, num_output_tokens), kept, num_top)


def columns_of(offset: int, tokens: Sequence[TokenLogprobs], num_top: int) -> LogprobColumns:
    """Return log-probabilities token by token as columns."""
    top = [best for token in tokens for best in token.top]
    return LogprobColumns(
        offset=offset,
        logprobs=np.array([token.logprob for token in tokens], dtype=np.float32),
        top_token_ids=np.array([token_id for token_id, _ in top], dtype=np.int32).reshape(len(tokens), num_top),
        top_logprobs=np.array([logprob for _, logprob in top], dtype=np.float32).reshape(len(tokens), num_top),
    )
