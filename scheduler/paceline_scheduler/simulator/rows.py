"""Requests on a simulated executor: on a row, and as the record that stays when they left it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline_scheduler.core.executors import RequestContext, RowState, carried_with
from paceline_scheduler.core.logprobs import LogprobColumns, TokenLogprobs
from paceline_scheduler.core.plan import FinalRelease, NewRequest, RowFinish
from paceline_scheduler.core.request import Int32Array, RecordId
from paceline_scheduler.simulator.blocks import BlockTable
from paceline_scheduler.simulator.tokens import TokenRule


@dataclass(frozen=True, slots=True)
class SimulatedRecord:
    """A request that left its row. `released` is None after a preemption."""

    key: RecordId
    attempt: int
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array
    finish: RowFinish
    released: FinalRelease | None
    logprobs: LogprobColumns | None
    carried: RequestContext

    def snapshot(self) -> RowState:
        """Return the record as an attaching scheduler sees it."""
        return RowState(
            key=self.key,
            row=None,
            attempt=self.attempt,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            num_computed_tokens=0,
            block_ids=np.zeros(0, dtype=np.int32),
            finish=self.finish,
            released=self.released,
            logprobs=self.logprobs,
            carried=self.carried,
        )


class SimulatedRow:
    """A request on a row: its tokens, how many of them are computed, and its block table."""

    def __init__(self, placement: NewRequest, max_model_len: int) -> None:
        self.placement = placement
        self.key = placement.request.key
        self.table = BlockTable(placement.row, self.key.tenant)
        self.finish = RowFinish.NONE
        self.num_computed_tokens = placement.num_cached_tokens
        self.logprobs: list[TokenLogprobs] = []  # of tokens of this attempt, if they were asked for
        prompt, output = placement.request.prompt_token_ids, placement.output_token_ids
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
        if token_id in self.placement.request.end_token_ids:
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
        return _columns(first, told, num_top)

    def record(self, released: FinalRelease | None) -> SimulatedRecord:
        """Return what stays when the row is released."""
        num_output_tokens = self.num_output_tokens if released is None else released.num_output_tokens
        first = self._num_prompt_tokens
        return SimulatedRecord(
            key=self.key,
            attempt=self.placement.attempt,
            prompt_token_ids=self._tokens[:first].copy(),
            output_token_ids=self._tokens[first : first + num_output_tokens].copy(),
            finish=self.finish,
            released=released,
            logprobs=self._logprobs_up_to(num_output_tokens),
            carried=carried_with(self.placement),
        )

    def snapshot(self) -> RowState:
        """Return the row as an attaching scheduler sees it."""
        first = self._num_prompt_tokens
        return RowState(
            key=self.key,
            row=self.placement.row,
            attempt=self.placement.attempt,
            prompt_token_ids=self._tokens[:first].copy(),
            output_token_ids=self._tokens[first : self._num_tokens].copy(),
            num_computed_tokens=self.num_computed_tokens,
            block_ids=np.array(self.table.block_ids, dtype=np.int32),
            finish=self.finish,
            released=None,
            logprobs=self._logprobs_up_to(self.num_output_tokens),
            carried=carried_with(self.placement),
        )

    def _logprobs_up_to(self, num_output_tokens: int) -> LogprobColumns | None:
        num_top, offset = self.placement.request.num_logprobs, len(self.placement.output_token_ids)
        if num_top is None:
            return None
        kept = self.logprobs[: max(0, num_output_tokens - offset)]
        return _columns(min(offset, num_output_tokens), kept, num_top)


def _columns(offset: int, tokens: Sequence[TokenLogprobs], num_top: int) -> LogprobColumns:
    top = [best for token in tokens for best in token.top]
    return LogprobColumns(
        offset=offset,
        logprobs=np.array([token.logprob for token in tokens], dtype=np.float32),
        top_token_ids=np.array([token_id for token_id, _ in top], dtype=np.int32).reshape(len(tokens), num_top),
        top_logprobs=np.array([logprob for _, logprob in top], dtype=np.float32).reshape(len(tokens), num_top),
    )
