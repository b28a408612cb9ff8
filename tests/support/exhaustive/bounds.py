"""What is planned of one row whose steps verify drafts, and what results make of it.

A core and an executor, as they are. Every order of planning, running, results and breaks is tried, every number of
drafts and of those that are right, and the end at every token; orders that lead to the same numbers are gone on with
once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import numpy as np

from both_sides.audited import ending, make_executor
from both_sides.harness import CoreHarness
from exhaustive.clockwork import require
from exhaustive.gen import Gen
from paceline.plan.values import Int32Array
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning import drafts
from paceline_scheduler.core.planning.capacity import ExecutorView
from paceline_scheduler.core.planning.step_budget import StepBudget
from paceline_scheduler.core.tables.rows import RUNNING, RowIndex
from paceline_scheduler.testing.requests import make_request

_ADDRESS = "executor-0"
_BLOCK_SIZE = 2
_PROMPT = (7, 7)
_END_PROBABILITY = 0.3
_RULE = ending(_END_PROBABILITY)
Numbers = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class BoundsScenario:
    """Of a row: its tokens and the drafts of a step at most, plans in flight, and how often its stream breaks."""

    max_tokens: int
    max_drafts: int
    max_in_flight: int
    num_cuts: int


class _Row:
    """One run."""

    def __init__(self, gen: Gen, scenario: BoundsScenario) -> None:
        self._gen, self._scenario = gen, scenario
        self._num_cuts = scenario.num_cuts
        self._most_blocks = -(-(len(_PROMPT) + scenario.max_tokens - 1) // _BLOCK_SIZE)
        executor = make_executor(
            num_blocks=16,
            block_size=_BLOCK_SIZE,
            max_num_rows=1,
            max_num_drafts=scenario.max_drafts,
            end_probability=_END_PROBABILITY,
            acceptance=lambda num_drafts: 1 + gen.int_inclusive(num_drafts),
        )
        limits = CoreLimits(max_plans_in_flight=scenario.max_in_flight, run_ahead_s=0.0)
        self.harness = CoreHarness(executor, limits=limits)
        self.num_tokens = 1 + gen.int_inclusive(scenario.max_tokens - 1)
        seed = _seed_of(self.num_tokens, scenario.max_tokens)
        ends = _RULE.end_token_ids
        self.harness.submit(make_request(_PROMPT, scenario.max_tokens, handle=1, seed=seed, end_token_ids=ends))

    def moves(self) -> list[Callable[[], object]]:
        """Return what may happen now."""
        executor, found = self.harness.views.executor(_ADDRESS), list[Callable[[], object]]()
        if len(executor.in_flight) < self._scenario.max_in_flight and self._has_to_plan():
            found.append(self.harness.plan)
        if self.harness.executors[_ADDRESS].num_plans_waiting:
            found.append(self.harness.run)
        if self.harness.results[_ADDRESS]:
            found.append(self.harness.complete)
        if self._num_cuts and found:
            found.append(self._cut)
        return found

    def _has_to_plan(self) -> bool:
        executor = self.harness.views.executor(_ADDRESS)
        rows = executor.rows
        is_open = bool(rows.state[0] == RUNNING and not rows.ended[0] and rows.num_scheduled[0] < rows.limit[0])
        return is_open or bool(executor.next_plan.ending_rows) or self.harness.views.num_waiting()[0] > 0

    def _cut(self) -> None:
        """The snapshot is the truth; what was under way is gone."""
        self._num_cuts -= 1
        self.harness.attach(_ADDRESS)

    def numbers(self) -> Numbers:
        """Return all that decides what may come of the row."""
        executor, inline = self.harness.views.executor(_ADDRESS), self.harness.executors[_ADDRESS]
        rows = executor.rows
        return (
            *(self.num_tokens, self._num_cuts, len(self.harness.client.token_ids.get(1, []))),
            *(int(column[0]) for column in (rows.state, rows.ended, rows.num_scheduled, rows.num_computed)),
            *(
                int(rows.num_slots[0]),
                rows.num_output(0) if rows.state[0] else -1,
                tuple(executor.next_plan.ending_rows),
            ),
            tuple((tuple(step.num_scheduled_after), tuple(step.num_scheduled)) for step in executor.in_flight),
            tuple((row, state.num_computed_tokens, state.output_token_ids.size) for row, state in inline.rows.items()),
            inline.num_plans_waiting,
            tuple(tuple(result.num_accepted) for result in self.harness.results[_ADDRESS]),
        )

    def check(self) -> None:
        """Check what must hold after every move."""
        executor, inline = self.harness.views.executor(_ADDRESS), self.harness.executors[_ADDRESS]
        rows = executor.rows
        if rows.state[0] != RUNNING or 0 not in inline.rows or rows.ended[0]:
            return
        truth, planned = inline.rows[0].num_computed_tokens, int(rows.num_scheduled[0])
        require(planned >= truth, "what is planned is never below what is computed")
        require(rows.num_computed[0] <= truth, "what is confirmed is never above what is computed")
        require(executor.in_flight or planned == truth, "what is planned is what is computed when nothing is in flight")
        require(planned <= rows.limit[0], "no position is planned beyond the last token")
        require(len(rows.tables[0]) <= self._most_blocks, "no block is granted that the row could do without")


def _seed_of(num_tokens: int, max_tokens: int) -> int:
    """Return a seed with which an output ends by itself behind so many tokens."""
    return next(
        seed
        for seed in range(10_000)
        if len(_RULE.output(_PROMPT, max_tokens, seed, _RULE.end_token_ids)) == num_tokens
    )


def bounds_run(gen: Gen, scenario: BoundsScenario, seen: set[Numbers]) -> None:
    """Let things happen in one order until nothing can happen any more, or all that follows was seen."""

    def any_drafts(_: ExecutorView, __: RowIndex, most: Int32Array, ___: StepBudget) -> tuple[Int32Array, float]:
        return np.array([gen.int_inclusive(max(0, n)) for n in most.tolist()], np.int32), 0.0

    with mock.patch.object(drafts, "best_drafts", any_drafts):
        row = _Row(gen, scenario)
        while moves := row.moves():
            gen.choice(moves)()
            row.check()
            numbers = row.numbers()
            if gen.is_on_new_ground:
                if numbers in seen:
                    return
                seen.add(numbers)
    client = row.harness.client
    is_whole = len(client.token_ids.get(1, [])) == row.num_tokens and 1 in client.finishes
    require(is_whole, "the row ends, with all its tokens")
    require(not row.harness.executors[_ADDRESS].rows, "no row stays")
