"""What is expected of an executor: how soon a prompt would be computed there, how fast tokens would follow.

Later arrivals are not in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning.capacity import ExecutorView
from paceline_scheduler.core.planning.step_time import Float64Array, Int64Array, StepTimes, num_chunk_pairs

_MIN_RATE_TOKENS = 16.0  # of a prompt, per step: the planner gives at least this


@dataclass(frozen=True, slots=True)
class Ahead:
    """`num_bounded` of them may generate `max_output_tokens` in all."""

    num_requests: int = 0
    num_tokens: float = 0  # to compute before they generate
    num_bounded: int = 0
    max_output_tokens: int = 0

    def __add__(self, other: "Ahead") -> "Ahead":
        return Ahead(
            self.num_requests + other.num_requests,
            self.num_tokens + other.num_tokens,
            self.num_bounded + other.num_bounded,
            self.max_output_tokens + other.max_output_tokens,
        )

    def share(self, num_executors: int) -> "Ahead":
        """In requests of mean size."""
        num_requests = self.num_requests // num_executors
        part = num_requests / max(self.num_requests, 1)
        num_bounded = round(self.num_bounded * part)
        return Ahead(num_requests, self.num_tokens / num_executors, num_bounded, round(self.max_output_tokens * part))

    def mean_output(self, usual: float) -> float:
        if not self.num_requests:
            return usual
        bounded = min(self.max_output_tokens, self.num_bounded * usual)
        return (bounded + (self.num_requests - self.num_bounded) * usual) / self.num_requests


class Pace(NamedTuple):
    """At which prompts are computed."""

    prefill_tokens_per_s: float  # beside what decodes
    backlog_s: float  # to compute begun prompts
    num_running: int


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    planned_s: float  # before a new request gets into a step
    full_planned_s: float  # where prompts fill those steps
    pace: Pace
    free_rows: int  # and blocks, and time between tokens
    ends_s: Float64Array  # expected ends of rows, ascending
    token_s: float  # for a request placed now
    usual_output: float  # tokens

    def begin_s(self, ahead: Ahead) -> float:
        """Each request ahead waits for its row and for the prompts before it, taken to be of the same length."""
        num_ahead = ahead.num_requests
        prompt_s = ahead.num_tokens / max(num_ahead, 1) / self.pace.prefill_tokens_per_s
        number = np.arange(num_ahead + 1)
        behind_s = (num_ahead - number) * prompt_s
        free_s = self._row_free_s(number, ahead.mean_output(self.usual_output) * self.token_s)
        begun_s = max(self.pace.backlog_s + num_ahead * prompt_s, float((free_s + behind_s).max()))
        return begun_s + (self.full_planned_s if begun_s > 0 else self.planned_s)

    def _row_free_s(self, number: npt.NDArray[np.int64], hold_s: float) -> Float64Array:
        """Returns when there is a row for each request, if each keeps it for `hold_s`."""
        free_s = np.concatenate((np.zeros(max(self.free_rows, 0)), self.ends_s))
        if not len(free_s):
            return np.full(len(number), hold_s)
        rounds, index = np.divmod(number, len(free_s))
        begun_s: Float64Array = free_s[index] + rounds * hold_s
        return begun_s


def load_of(view: ExecutorView, limits: CoreLimits) -> Load:
    rows = view.rows
    running = rows.running()
    num_running, num_pairs = len(running), int(rows.num_scheduled[running].sum())
    step_s = view.step_time.predict_ns(num_running, num_pairs) / 1e9 if num_running else 0.0
    rest = np.sort(view.expected_rest(running))
    return Load(
        planned_s=_planned_s(view, limits, step_s),
        full_planned_s=_planned_s(view, limits, max(step_s, limits.mixed_step_s(step_s))),
        pace=pace_of(view, limits),
        free_rows=min(
            rows.num_free, _num_timely(view, limits, num_running, num_pairs), _num_held(view, num_pairs, rest)
        ),
        ends_s=(rest * step_s / view.speculation.speedup).astype(np.float64),
        token_s=max(step_s, view.step_time.predict_ns(1, 0) / 1e9) / view.speculation.speedup,
        usual_output=view.output_lengths.mean,
    )


def pace_of(view: ExecutorView, limits: CoreLimits) -> Pace:
    rows = view.rows
    running = rows.running()
    scheduled = rows.num_scheduled[running]
    num_behind = int(np.maximum(rows.target[running] - scheduled, 0).sum())
    rate = prefill_rate(view, limits, len(running), int(scheduled.sum()))
    return Pace(rate, num_behind / rate, len(running))


def _planned_s(view: ExecutorView, limits: CoreLimits, step_s: float) -> float:
    if not view.rows.num_running:
        return 0.0
    return step_s * limits.num_plans_ahead(step_s, view.description.max_plans_in_flight)


def _num_timely(view: ExecutorView, limits: CoreLimits, num_running: int, num_pairs: int) -> int:
    """Requests of mean length that can decode without making steps too slow."""
    most = len(view.rows.state) - num_running
    if not most or not num_running:
        return most
    mean = num_pairs // num_running
    number = num_running + 1 + np.arange(most)
    base_ns = view.step_time.predict_ns(0, 0)
    each_ns = view.step_time.predict_ns(1, mean) - base_ns
    return int(np.count_nonzero(base_ns + number * each_ns <= limits.decode_only_step_s * 1e9))


def _num_held(view: ExecutorView, num_pairs: int, rest: npt.NDArray[np.int64]) -> int:
    if not len(rest):
        return len(view.rows.state)
    mean = num_pairs / len(rest) + int(rest.sum()) / len(rest)
    return int(view.pool.num_available * view.description.block_size / max(mean, 1.0))


def prefill_rate(view: ExecutorView, limits: CoreLimits, num_decodes: int, num_pairs: int) -> float:
    """Returns tokens per second; `num_pairs` as in `step_time`."""
    max_tokens = limits.max_num_batched_tokens or view.description.max_num_batched_tokens
    room = max(1, min(max_tokens, view.description.max_num_batched_tokens) - num_decodes)
    decodes_s = view.step_time.predict_ns(num_decodes, num_pairs) / 1e9
    target_s = limits.mixed_step_s(decodes_s) if num_decodes else limits.max_step_s
    fitting = view.step_time.max_tokens_within(target_s * 1e9, (num_decodes, num_pairs), 0, room)
    chunk = max(float(fitting), min(_MIN_RATE_TOKENS, room))
    pairs = num_pairs + num_chunk_pairs(0, int(chunk))
    return chunk / max(view.step_time.predict_ns(num_decodes + chunk, pairs) / 1e9, 1e-9)


def prefill_s(
    times: StepTimes, prefill_tokens_per_s: Float64Array, num_cached: Int64Array, num_known: int
) -> Float64Array:
    """Of each executor; includes the attention to cached tokens."""
    num_tokens = np.maximum(1, num_known - num_cached)
    alone_ns = times.predict_ns(num_tokens, num_chunk_pairs(num_cached, num_tokens))
    pairs_ns = alone_ns - times.predict_ns(num_tokens, 0)
    return np.maximum(num_tokens / prefill_tokens_per_s + pairs_ns / 1e9, alone_ns / 1e9)


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing else to do: no request is faster anywhere."""

    view: ExecutorView
    prefill_tokens_per_s: float

    def least_s(self, num_cached: int, num_known: int, num_output: int, max_drafts: int) -> float:
        """All of its drafts may be right."""
        num_tokens = max(1, num_known - num_cached)
        step_s = self.view.step_time.predict_ns(1, num_known) / 1e9
        return num_tokens / self.prefill_tokens_per_s + (num_output - 1) / (1 + max_drafts) * step_s


def idle(view: ExecutorView, limits: CoreLimits) -> Idle:
    return Idle(view, prefill_rate(view, limits, 0, 0))


def begin_s(loads: Sequence[Load], ahead: Ahead) -> float:
    """The executors share the queue."""
    share = ahead.share(len(loads))
    return min(load.begin_s(share) for load in loads)
