"""Requests served by an engine, each on a row of its own or as random plans have it, and all that comes of each."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

import numpy as np

from executor_rig.plans import plan
from executor_rig.random_plans import Request, Scheduler
from paceline.plan.values import BatchPlan, NewRequest, StepResult
from paceline_executor.errors import StepFailedError
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine, Ticket
from paceline_executor.rows.forms import FormMasker
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import Runner

OF_THE_TEST = "of the test"  # in the message of every failure that a test makes
FAILURES = 0.15  # how often a launch fails
MAX_TURNS = 4000

Logprob = tuple[int, float, list[int], list[float]]  # a token's, and the most likely ones


@dataclass
class Outcome:
    """All that came of a request; two compare to the bit."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)  # by position: told again after a preemption
    finish: int = 0
    error: str = ""

    def take(self, result: StepResult, row: int, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.finish = int(result.finishes[result.rows.tolist().index(row)])
        self.error = next((error.reason for error in result.errors if error.row == row), "")
        for told in result.logprobs:
            if told.row == row:
                columns = told.columns
                lines = zip(told.token_ids, columns.logprobs, columns.top_token_ids, columns.top_logprobs, strict=True)
                self.logprobs += [(int(a), float(b), c.tolist(), d.tolist()) for a, b, c, d in lines]
        for told in result.prompt_logprobs:
            if told.row == row:
                self.prompt_logprobs.update(enumerate(told.columns.logprobs.tolist(), told.columns.offset))


def tokens_of_rows(result: StepResult) -> list[tuple[int, list[int]]]:
    """Each row with the tokens it was given."""
    tokens = iter(result.token_ids.tolist())
    counts = zip(result.rows.tolist(), result.num_accepted.tolist(), strict=True)
    return [(row, [next(tokens) for _ in range(count)]) for row, count in counts]


@dataclass(frozen=True)
class Step:
    """Of a step: drafts that it might have, that it verified, that were right."""

    granted: int
    verified: int
    accepted: int


def step_of(granted: int, result: StepResult) -> Step:
    accepted = int(np.maximum(result.num_accepted - 1, 0).sum())
    return Step(granted, int(result.num_draft_tokens.sum()), accepted)


def serve(
    engine: Engine,
    requests: Sequence[NewRequest],
    num_drafts: Callable[[int, int], int] = lambda *_: 0,
    num_steps: int | None = None,
) -> tuple[list[Outcome], list[Step]]:
    """All requests together, each on its row and in blocks of its own, until they end: whole prompts, then decodes.

    num_drafts: how many drafts a row may have in a step, both counted from 0; as many as it has room for.
    """
    limits = engine.table.limits
    outcomes = {request.row: Outcome() for request in requests}
    known = {request.row: request.prompt_token_ids.size for request in requests}
    ends = {request.row: min(known[request.row] + request.max_tokens, limits.max_model_len) for request in requests}
    per_row = -(-max(ends.values()) // limits.block_size)
    contents: dict[str, Any] = {"place": requests}
    contents["grants"] = [(row, index, row * per_row + index) for row in outcomes for index in range(per_row)]
    steps: list[Step] = []
    while (going := [row for row in outcomes if not outcomes[row].finish]) and len(steps) != num_steps:
        drafts = [max(0, min(num_drafts(row, len(steps)), ends[row] - known[row] - 1)) for row in going]
        chunks = [1 if steps else known[row] for row in going]
        scheduled = [(row, chunk + most) for row, chunk, most in zip(going, chunks, drafts, strict=True)]
        planned = plan(scheduled, step_id=len(steps) + 1, drafts=drafts if any(drafts) else (), **contents)
        result = engine.collect(engine.launch(planned))
        for row, tokens in tokens_of_rows(result):
            outcomes[row].take(result, row, tokens)
            known[row] += len(tokens)
        steps.append(step_of(sum(drafts), result))
        contents = {}
    return list(outcomes.values()), steps


class Plain:
    """What comes of a request alone, without drafts; computed once for each."""

    def __init__(self, runner: Runner, limits: RowLimits, forms: FormMasker | None = None) -> None:
        self._runner = runner
        self._forms = forms
        self._limits = replace(limits, max_num_draft_tokens=0)
        self._outcomes: dict[str, Outcome] = {}

    def outcome(self, request: NewRequest) -> Outcome:
        key = repr(request)
        if key not in self._outcomes:
            engine = Engine(RowTable(self._limits, self._forms), self._runner)
            ((self._outcomes[key],), _) = serve(engine, [replace(request, row=0)])
        return self._outcomes[key]


class Device(Protocol):
    """What is launched next fails by `fail_next`, and steps are done when `late_by` has it."""

    fail_next: Exception | None

    def late_by(self, seed: int) -> None: ...


class RandomRun:
    """Requests served by plans drawn at random: chunks, mixed rows, shared and copied blocks, preemptions, failures.

    max_drafts: of a row and step. device: on which steps fail at times, with as many in flight as the engine allows;
    without one none fails, and one is in flight.
    """

    def __init__(
        self,
        engine: Engine,
        wanted: Sequence[NewRequest],
        seed: int,
        max_drafts: int,
        device: Device | None = None,
    ) -> None:
        self.random = Random(seed)  # noqa: S311  # reproducible on purpose
        self.engine = engine
        self.max_in_flight = engine.max_in_flight if device else 1
        self.device = device
        if device:
            device.late_by(seed)
        self.wanted = {f"request-{index}": request for index, request in enumerate(wanted)}
        requests = [
            Request(name, each.prompt_token_ids.tolist(), each.max_tokens, -1) for name, each in self.wanted.items()
        ]
        self.scheduler = Scheduler(self.random, requests, max_drafts, engine.table.limits)
        self.outcomes = {name: Outcome() for name in self.wanted}
        self.in_flight: deque[tuple[BatchPlan, Ticket]] = deque()
        self.reached: Counter[str] = Counter()

    def run(self) -> list[Outcome]:
        """Until all requests have ended."""
        for _ in range(MAX_TURNS):
            if self.scheduler.is_done and not self.in_flight:
                return list(self.outcomes.values())
            is_alone = self.max_in_flight == 1
            if len(self.in_flight) < self.max_in_flight and (is_alone or self.random.random() < 0.75):
                planned = self.scheduler.plan()
                placed = tuple(map(self._asking, planned.new_requests))
                self._launch(replace(planned, new_requests=placed))
            elif self.in_flight:
                self._land()
        raise AssertionError("the requests do not end")

    def _asking(self, placed: NewRequest) -> NewRequest:
        """What is wanted, where the scheduler places it."""
        return replace(
            self.wanted[placed.record_id.request_id],
            row=placed.row,
            record_id=placed.record_id,
            output_token_ids=placed.output_token_ids,
            num_cached_tokens=placed.num_cached_tokens,
        )

    def _launch(self, planned: BatchPlan) -> None:
        """Where a plan needs what has not landed, that lands first."""
        while not self.engine.can_launch(planned):
            if not self._land():
                return  # the plan is of an epoch that is over
        fails = self.random.random() < FAILURES and not planned.copies.sources.size  # copies that fail may end all
        if self.device:
            self.device.fail_next = MemoryError(OF_THE_TEST) if fails else None
        self.in_flight.append((planned, self.engine.launch(planned)))
        if self.device:
            self.device.fail_next = None
        if planned.num_draft_tokens.any():
            is_mixed = (planned.num_scheduled_tokens - planned.num_draft_tokens > 1).any()
            self.reached["chunks beside drafts"] += bool(is_mixed)
        if len(self.in_flight) > 1:
            self.reached["drafts behind drafts"] += all(each.num_draft_tokens.any() for each, _ in self.in_flight)

    def _land(self) -> bool:
        """Says whether the oldest step did not fail."""
        planned, ticket = self.in_flight.popleft()
        try:
            result = self.engine.collect(ticket)
        except StepFailedError as error:
            if OF_THE_TEST not in str(error.__cause__):
                raise
            self.reached["failed"] += 1
            self.in_flight.clear()
            self.scheduler.rebuild(self.engine.table.states())
            return False
        for row, tokens in tokens_of_rows(result):
            outcome = self.outcomes[{**self.scheduler.running, **self.scheduler.leaving}[row].name]
            if not outcome.finish:
                outcome.take(result, row, tokens)
        step = step_of(0, result)
        self.reached.update(verified=step.verified, accepted=step.accepted)
        self.reached.update(released=len(planned.releases), copied=planned.copies.sources.size)
        self.scheduler.take(planned, result)
        return True
