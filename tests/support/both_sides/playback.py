"""Recorded answers, served again by the real core and the real rows with prompt lookup, in as much time as steps took.

Knows what to draw and how long a step takes, so it needs neither a model nor a quiet machine.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from both_sides.executor import InlineExecutor, loaded_on
from both_sides.harness import CoreHarness
from executor_rig.plans import int32
from paceline.plan.values import StepPoint, StepResult, StepTimings
from paceline_executor.limits import RowLimits
from paceline_executor.runner.drafter import MAX_NUM_DRAFT_TOKENS, PromptLookup
from paceline_executor.runner.interface import FlatBatch, Int32Array, StepOutput
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_executor.runner.step_times import StepTimeCurve
from paceline_scheduler.core.request import Request
from scheduler_rig.requests import make_request

_FIRST = "executor-0"
_MAX_TOKENS = 160
_BLOCK_SIZE = 16
_EMPTY_MS = 0.1  # of a step whose rows have ended
_LOOKUP_MS = 0.014  # of a row that is asked: what 32 rows add to a step of the rows table


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model made of a prompt: both, and where the answer begins."""

    token_ids: Int32Array
    start: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids.size - self.start

    def token_at(self, offset: int) -> int:
        """Behind its last token nobody looks."""
        return int(self.token_ids[min(self.start + offset, self.token_ids.size - 1)])


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of steps of so many rows with so many drafts each; in between and beyond they lie on lines."""

    num_rows: Sequence[int]
    num_drafts: Sequence[int]
    ms: npt.NDArray[np.float64]  # [len(num_rows), len(num_drafts)]

    def step_ms(self, num_rows: int, num_more: int) -> float:
        """`num_more`: tokens beside one of each row, as drafts or of prompts."""
        most, each = self.num_drafts[-1], num_more / num_rows
        of_rows = [float(np.interp(each, self.num_drafts, costs)) for costs in self.ms]
        slopes = (self.ms[:, -1] - self.ms[:, 0]) / most
        beyond = max(0.0, each - most) * float(np.interp(num_rows, self.num_rows, slopes))
        return float(np.interp(num_rows, self.num_rows, of_rows)) + beyond

    def points(self) -> tuple[StepPoint, ...]:
        """What an executor tells of its warm-up: steps of one row."""
        return tuple(StepPoint(count, int(self.step_ms(1, count - 1) * 1e6)) for count in (1, 16, 64, 256))


@dataclass(frozen=True, slots=True)
class Played:
    """What a series of answers came to."""

    num_tokens: int
    num_verified: int
    num_right: int
    busy_ms: float

    @property
    def tokens_per_ms(self) -> float:
        """Of the executor's steps."""
        return self.num_tokens / self.busy_ms


class _Recorded(SimulatedRunner):
    """Draws what was recorded: seeds are places of answers."""

    def __init__(self, answers: Sequence[Answer], limits: RowLimits, step_times: StepTimeCurve) -> None:
        super().__init__(
            limits.num_blocks, limits.block_size, limits.vocab_size, step_times=step_times, sleep=lambda _: None
        )
        self.draft_by(PromptLookup())
        self.size = (0, 0)  # rows and tokens of the last step
        self._answers = answers

    def compute(self, batch: FlatBatch) -> StepOutput:
        self.size = len(batch.context_lens), batch.token_ids.size
        return super().compute(batch)

    def _draw(self, batch: FlatBatch) -> Int32Array:
        seeds, offsets = batch.sampling.seeds.tolist(), batch.sampling.offsets.tolist()
        return int32([self._answers[seed].token_at(offset) for seed, offset in zip(seeds, offsets, strict=True)])


def play(answers: Sequence[Answer], num_rows: int, costs: Costs, num_drafts: int | None) -> Played:
    """Every answer once, so many at a time, with so many drafts for every row, or None for the core's choice."""
    playback = _Playback(answers, num_rows, costs)
    requests = [_request(answer, place) for place, answer in enumerate(answers)]
    # The prompts are in the prefix cache when it begins, as those of a text that is edited again and again.
    playback.serve([replace(each, handle=-1 - each.handle, max_tokens=1) for each in requests])
    playback.harness.drafts = () if num_drafts is None else (num_drafts,)
    played = playback.serve(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert playback.harness.client.token_ids[request.handle] == answer.token_ids[answer.start :].tolist()
    return played


def _request(answer: Answer, place: int) -> Request:
    last = int(answer.token_ids[-1])
    is_ended = last not in answer.token_ids[answer.start : -1]  # else length ends it, as it does some that seem ended
    return make_request(
        answer.token_ids[: answer.start].tolist(),
        _MAX_TOKENS if is_ended else answer.num_tokens,
        seed=place,
        end_token_ids=(last,) if is_ended else (),
    )


class _Playback:
    def __init__(self, answers: Sequence[Answer], num_rows: int, costs: Costs) -> None:
        longest = max(answer.start for answer in answers) + _MAX_TOKENS + 1
        self._limits = RowLimits(
            num_rows=num_rows,
            max_model_len=longest,
            max_num_batched_tokens=1 << 14,
            num_blocks=num_rows * -(-longest // _BLOCK_SIZE) * 2,
            block_size=_BLOCK_SIZE,
            vocab_size=1 << 17,
            max_num_draft_tokens=MAX_NUM_DRAFT_TOKENS,
        )
        times = StepTimeCurve(tuple((point.num_tokens, float(point.duration_ns)) for point in costs.points()))
        self._runner = _Recorded(answers, self._limits, times)
        self._costs = costs
        self.harness = CoreHarness(InlineExecutor(lambda: loaded_on(self._runner, self._limits)))

    def serve(self, requests: Sequence[Request]) -> Played:
        """All of them, as many at once as there are rows."""
        harness, waiting = self.harness, deque(requests)
        num_tokens = num_verified = num_right = 0
        busy_ms = 0.0
        while harness.views.num_unfinished() or waiting:
            while waiting and harness.views.num_unfinished() < self._limits.num_rows:
                harness.submit(waiting.popleft())
            while harness.plan() is not None:
                pass
            result, step_ms = self._step()
            harness.complete()
            busy_ms += step_ms
            num_tokens += int(result.num_accepted.sum())
            if len(result.num_draft_tokens):
                num_verified += int(result.num_draft_tokens.sum())
                num_right += int((result.num_accepted - 1).clip(0, result.num_draft_tokens).sum())
        return Played(num_tokens, num_verified, num_right, busy_ms)

    def _step(self) -> tuple[StepResult, float]:
        """Runs one, and tells what it takes, in milliseconds."""
        self._runner.size = (0, 0)
        assert self.harness.run(_FIRST), "there is something to do"
        result = self.harness.results[_FIRST].pop()
        num_rows, num_tokens = self._runner.size
        step_ms = self._costs.step_ms(num_rows, num_tokens - num_rows) if num_rows else _EMPTY_MS
        draft_ms = _LOOKUP_MS * len(result.num_draft_tokens)
        told = StepTimings(forward_ns=int(step_ms * 1e6), draft_ns=int(draft_ms * 1e6))
        self.harness.clock.advance((step_ms + draft_ms) / 1e3)
        self.harness.results[_FIRST].append(replace(result, timings=told))
        return result, step_ms + draft_ms
