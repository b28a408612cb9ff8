"""A core with executors and a collecting client, driven one event at a time."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
from typing_extensions import override

from both_sides.audited import expected_output, make_executor
from both_sides.executor import InlineExecutor
from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import BatchPlan, FinishReason, Int32Array, StepResult
from paceline_executor.errors import DeviceError, StepFailedError
from paceline_scheduler.core.answers import Explanation
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import (
    Acknowledge,
    Cancel,
    Detach,
    DrainExecutor,
    EndCompletion,
    Event,
    ExecutorAttached,
    ExecutorLost,
    ExpectExecutors,
    ReplyT,
    Resume,
    StepFinished,
    StreamEnded,
    Submit,
    Tick,
)
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning import drafts
from paceline_scheduler.core.planning.capacity import ExecutorView
from paceline_scheduler.core.planning.step_budget import StepBudget
from paceline_scheduler.core.request import Request, ResumePoint
from paceline_scheduler.core.tables.rows import RowIndex
from paceline_scheduler.core.views import CoreViews
from scheduler_rig.collector import OutputCollector
from virtual_time.clock import ManualClock

_MAX_TURNS = 20_000


def scheduled(plan: BatchPlan) -> dict[int, int]:
    return dict(zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True))


def preempted_rows(plan: BatchPlan) -> list[int]:
    """Return the rows that a plan takes off without ending them."""
    return [release.row for release in plan.releases if release.final is None]


class CoreEvents(ABC):
    """What clients, operators and executors do to a core, an event each."""

    clock: ManualClock

    @abstractmethod
    def feed(self, event: Event[ReplyT]) -> ReplyT:
        """Let something happen at the clock's time, deliver what comes of it and return the answer."""

    def lose(self, address: str = "executor-0") -> None:
        """Give an executor up; it may come back with its rows."""
        self.feed(ExecutorLost(address))

    def drain(self, address: str = "executor-0") -> int:
        """Let an operator drain an executor; returns how many requests run there."""
        return self.feed(DrainExecutor(address))

    def detach(self, request: Request) -> None:
        self.feed(Detach(request.handle))

    def cancel(self, request: Request) -> None:
        self.feed(Cancel(request.key))

    def acknowledge(self, request: Request) -> None:
        self.feed(Acknowledge((request.key,)))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.feed(Tick())

    def end(self, request: Request, num_output_tokens: int) -> None:
        """End a request as the edge does when it finds a stop text."""
        self.feed(EndCompletion(request.handle, num_output_tokens, FinishReason.STOP))


class CoreHarness(CoreEvents):
    """The three sides of a scheduler's core: executors that keep the protocol's rules, and what clients would see."""

    def __init__(self, *executors: InlineExecutor, limits: CoreLimits | None = None) -> None:
        self.clock = ManualClock()
        self.drafts: Sequence[int] = ()  # that each row gets, the same numbers over and over; empty: what is best
        self.limits = limits or CoreLimits()
        self.core = self.new_core()
        self.wake_at: float | None = None  # as the last event told
        self.client = OutputCollector()
        self.executors = {f"executor-{index}": executor for index, executor in enumerate(executors)}
        self.num_ended_by_themselves = 0  # executors, because of steps that failed
        self.results: dict[str, deque[StepResult]] = {address: deque() for address in self.executors}
        for address in self.executors:
            self.attach(address)

    def new_core(self) -> Core:
        return Core(self.limits)

    @property
    def views(self) -> CoreViews:
        return self.core.views

    @override
    def feed(self, event: Event[ReplyT]) -> ReplyT:
        effects = self.core.apply(event, self.clock())
        self.wake_at = effects.wake_at
        self.client.deliver(effects.tokens, effects.failures)
        return effects.reply

    def attach(self, address: str = "executor-0") -> None:
        """Open the plan stream: what was under way in the old one is gone."""
        self.results[address].clear()
        description, snapshot = self.executors[address].attach(address)
        self.feed(ExecutorAttached(description, snapshot))

    def die(self, address: str = "executor-0") -> None:
        self.lose(address)
        self.executors[address].restart()
        self.attach(address)

    def break_stream(self, address: str = "executor-0", *, drops_plans: bool = False) -> None:
        """Break the plan stream and open it again: results on their way are gone, and plans too if `drops_plans`."""
        self.feed(StreamEnded(address))
        if drops_plans:
            self.executors[address].drop_waiting()
        self.attach(address)

    def succeed(self) -> None:
        """Let the scheduler die with all it knows, and another one take over; what clients have they still have."""
        self.core = self.new_core()
        self.feed(ExpectExecutors(tuple(self.executors)))
        for address in self.executors:
            self.attach(address)

    def resume(self, request: Request, *, holds_tokens: bool = True) -> None:
        """Let the client of a request come back with what it has; `holds_tokens`: it sends its tokens along."""
        held = np.array(self.client.token_ids.get(request.handle, []), dtype=np.int32)
        point = ResumePoint(
            resume_from=len(held),
            resume_hash=rolling_hash(HASH_START, held),
            last_attempt=self.client.attempts.get(request.handle, 0),
            prior_output_token_ids=held if holds_tokens else None,
        )
        (resumed,) = self.feed(Resume((replace(request, point=point),)))
        assert np.array_equal(resumed.prefix_token_ids, held), "the client is told what it has already"
        if resumed.outputs is not None:
            self.client.deliver((resumed.outputs,), ())

    def expect_short_outputs(self, address: str = "executor-0") -> None:
        """Let the core believe that outputs end after a token or two, so that it admits more than the pool can hold."""
        lengths = self.views.executor(address).output_lengths
        lengths.mean = lengths.deviation = 1.0

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.feed(Submit((request,)))

    def explain(self, request: Request) -> Explanation:
        return self.views.explain(request.key, self.clock())

    def assert_whole(self, *requests: Request) -> None:
        """Their clients have what an undisturbed run gives, once."""
        for request in requests:
            assert tuple(self.client.token_ids[request.handle]) == expected_output(request)
            assert request.handle in self.client.finishes

    def plan(self, address: str = "executor-0") -> BatchPlan | None:
        self.feed(Tick())
        plan = self._plan(address) if not self.drafts else self._plan_drafting(address)
        if plan is not None:
            self.executors[address].receive(plan)
        return plan

    def _plan(self, address: str) -> BatchPlan | None:
        return self.core.plan(address, self.clock())

    def _plan_drafting(self, address: str) -> BatchPlan | None:
        """Plan with numbers of drafts that are given, instead of the best."""
        most_of = self.views.executor(address).ledger.rows.max_drafts
        most_of[:] = np.resize(self.drafts, len(most_of))

        def all_there_may_be(
            _: ExecutorView, __: RowIndex, most: Int32Array, ___: StepBudget
        ) -> tuple[Int32Array, float]:
            return np.maximum(most, 0), 0.0

        with mock.patch.object(drafts, "best_drafts", all_there_may_be):
            return self._plan(address)

    def run(self, address: str = "executor-0") -> bool:
        """Let the executor run its next plan; False when it has none. Where the step fails the link attaches again.

        An executor that ends because of it is another one by then.
        """
        if not self.executors[address].num_plans_waiting:
            return False
        try:
            self.results[address].append(self.executors[address].run_next())
        except (StepFailedError, DeviceError) as error:
            while self.complete(address):
                pass
            if isinstance(error, DeviceError):
                self.num_ended_by_themselves += 1
                self.feed(ExecutorLost(address))
                self.executors[address].restart()
            self.attach(address)
        return True

    def complete(self, address: str = "executor-0") -> bool:
        """Let the oldest result arrive; False when there is none."""
        if not self.results[address]:
            return False
        self.feed(StepFinished(address, self.results[address].popleft()))
        return True

    def step(self, address: str = "executor-0") -> BatchPlan | None:
        plan = self.plan(address)
        if plan is not None:
            self.run(address)
            self.complete(address)
        return plan

    def steps(self, number: int, address: str = "executor-0") -> list[BatchPlan | None]:
        return [self.step(address) for _ in range(number)]

    def step_until_preempted(self) -> None:
        """Go on until a request waits, as one does that was preempted."""
        while not self.views.num_waiting()[0]:
            self.step()

    def run_ahead(self, number: int = 1, address: str = "executor-0") -> None:
        """Plan and run so many steps, whose results are on their way."""
        for _ in range(number):
            self.plan(address)
            self.run(address)

    def finish(self) -> None:
        for _ in range(_MAX_TURNS):
            moved = False
            for address in self.executors:
                moved |= self.plan(address) is not None
                moved |= self.run(address)
                moved |= self.complete(address)
            if not moved:
                return
        raise AssertionError("the core does not come to rest")


def running(*requests: Request, on: InlineExecutor | None = None, steps: int = 1) -> CoreHarness:
    harness = CoreHarness(on or make_executor())
    harness.submit(*requests)
    harness.steps(steps)
    return harness
