"""Requests that arrive whether or not others are done, in virtual time.

Runs the core against executors without a model, whose steps take as long as is said, and keeps what became of each
request.
"""

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np

from both_sides.executor import InlineExecutor, load_plain
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import RecordId, StepResult
from paceline_executor.limits import RowLimits
from paceline_executor.runner.step_times import StepTimeCurve
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import Event, ExecutorAttached, ReplyT, StepFinished, Submit
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.request import Request
from paceline_scheduler.errors import RequestRefusedError

_VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True)
class Capacity:
    """The bounds of an executor, and how long its steps take."""

    num_blocks: int
    max_num_rows: int
    max_num_batched_tokens: int
    max_model_len: int
    step_times: StepTimeCurve

    def executor(self, incarnation: int) -> InlineExecutor:
        """Return an executor of this capacity, with blocks of 16 tokens."""
        limits = RowLimits(
            num_rows=self.max_num_rows,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_blocks=self.num_blocks,
            block_size=16,
            vocab_size=_VOCAB_SIZE,
        )
        return InlineExecutor(partial(load_plain, limits, self.step_times), incarnation)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at a time, with a prompt and an output of these lengths in tokens."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""


@dataclass(slots=True)
class Course:
    """What became of one arrival."""

    arrival: Arrival
    token_s: list[float] = field(default_factory=list)  # when each token came
    was_refused: bool = False

    @property
    def first_s(self) -> float:
        return self.token_s[0] - self.arrival.at_s

    @property
    def between_s(self) -> float:
        gaps = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / gaps if gaps else 0.0

    def is_good(self, max_first_s: float, max_between_s: float) -> bool:
        is_whole = len(self.token_s) == self.arrival.num_output_tokens
        return is_whole and self.first_s <= max_first_s and self.between_s <= max_between_s


class OpenLoop:
    """One scheduler's core, its executors and the arrivals, in virtual time."""

    def __init__(self, capacities: Sequence[Capacity], limits: CoreLimits) -> None:
        self.core = Core(limits)
        self.courses: list[Course] = []
        self.preempted: set[int] = set()  # handles
        self._now_s = 0.0
        self._executors = {f"executor-{i}": capacity.executor(i + 1) for i, capacity in enumerate(capacities)}
        self._running: dict[str, StepResult | None] = dict.fromkeys(self._executors)
        self._events: list[tuple[float, int, str | Arrival]] = []
        self._numbers = count()
        for address, executor in self._executors.items():
            self._feed(ExecutorAttached(*executor.attach(address)))

    def run(self, arrivals: Iterable[Arrival]) -> list[Course]:
        """Let them arrive and run until all have ended; returns what became of each, in order of arrival."""
        for arrival in arrivals:
            self._push(arrival.at_s, arrival)
        while self._events:
            self._now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, Arrival):
                self._arrive(event)
            else:
                result, self._running[event] = self._running[event], None
                assert result is not None, "a step ends once"
                self._feed(StepFinished(event, result))
            for address in self._executors:
                self._drive(address)
        return self.courses

    def _push(self, at_s: float, event: str | Arrival) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), event))

    def _arrive(self, arrival: Arrival) -> None:
        handle = len(self.courses)
        self.courses.append(Course(arrival))
        prompt = (np.arange(arrival.num_prompt_tokens, dtype=np.int32) * 31 + handle * 1009) % 30_000
        request = Request(
            handle=handle,
            key=RecordId(arrival.tenant, f"request-{handle}"),
            model="simulated",
            prompt_token_ids=prompt,
            sampling=SamplingParams(0.0, 0, 1.0, 0.0, handle),
            end_token_ids=(),
            max_tokens=arrival.num_output_tokens,
        )
        try:
            self._feed(Submit((request,)))
        except RequestRefusedError:
            self.courses[handle].was_refused = True

    def _drive(self, address: str) -> None:
        """Send what the core plans, and begin the next step of an executor that has nothing to do."""
        executor = self._executors[address]
        while (plan := self.core.plan(address, self._now_s)) is not None:
            rows = self.core.views.executor(address).ledger.rows
            self.preempted |= {int(rows.handle[r.row]) for r in plan.releases if r.final is None}
            executor.receive(plan)
        if self._running[address] is None and executor.num_plans_waiting:
            result = self._running[address] = executor.run_next()
            self._push(self._now_s + result.timings.forward_ns / 1e9, address)

    def _feed(self, event: Event[ReplyT]) -> None:
        effects = self.core.apply(event, self._now_s)
        for tokens in effects.tokens:
            for handle, num_tokens in zip(tokens.handles, tokens.num_tokens.tolist(), strict=True):
                self.courses[handle].token_s += [self._now_s] * num_tokens


def poisson(
    rate: float, seconds: float, chance: random.Random, num_prompt_tokens: int, num_output_tokens: int
) -> list[Arrival]:
    """Return arrivals at a mean rate per second; lengths are exponential around these means, up to four times them."""
    arrivals = []
    at_s = chance.expovariate(rate)
    while at_s < seconds:
        num_prompt, num_output = (
            min(4 * mean, 1 + round(chance.expovariate(1 / mean))) for mean in (num_prompt_tokens, num_output_tokens)
        )
        arrivals.append(Arrival(at_s, num_prompt, num_output))
        at_s += chance.expovariate(rate)
    return arrivals


def faster(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    return [replace(arrival, at_s=arrival.at_s / factor) for arrival in arrivals]
