"""What is known of an executor's process, beside its ledger: the steps it has not answered, and what it taught."""

from collections import deque
from dataclasses import dataclass, replace

from paceline.plan.values import BatchPlan, FinalRelease, FinishReason, Int32Array
from paceline_scheduler.core.executor.ledger import Ledger
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.planning.capacity import ExecutorView
from paceline_scheduler.core.planning.growth import OutputLengths
from paceline_scheduler.core.planning.planner import Decision
from paceline_scheduler.core.planning.speculation import Speculation
from paceline_scheduler.core.planning.step_time import StepTimeModel
from paceline_scheduler.core.suspects import Suspects, UnansweredStep
from paceline_scheduler.core.tables.rows import RowIndex


@dataclass(frozen=True, slots=True)
class StepInFlight:
    step_id: int
    index: RowIndex
    num_scheduled_after: Int32Array  # [num_rows] positions planned up to and including this step, at most
    num_scheduled: Int32Array  # [num_rows] by this step alone
    num_drafts: Int32Array  # [num_rows] of these, or empty: nobody drafts
    released_rows: tuple[int, ...]
    num_preempted: int  # of these
    grant_hash: int
    num_tokens: int
    num_pairs: int
    predicted_ns: int

    def lowered(self, surplus: Int32Array) -> "StepInFlight":
        """Those positions were not computed before this step."""
        num_pairs = self.num_pairs - int((surplus * self.num_scheduled).sum())
        return replace(self, num_scheduled_after=self.num_scheduled_after - surplus, num_pairs=num_pairs)


class Attachment:
    """From an accepted Attach to the end of that stream."""

    def __init__(self, description: ExecutorDescription) -> None:
        self.description = description
        self.ledger = Ledger(description)
        self.in_flight: deque[StepInFlight] = deque()
        self.step_time = StepTimeModel(description.step_points)
        self.output_lengths = OutputLengths()
        self.speculation = Speculation(description.max_num_rows, description.max_num_draft_tokens)
        self.suspects = Suspects[LiveRequest]()
        self.full_tenants = frozenset[str]()  # whose requests the last plan passed over
        self.attached = True
        self.draining = False
        self.leaving = False  # it drains by itself: no operator can undo that

    def view(self) -> ExecutorView:
        ledger = self.ledger
        return ExecutorView(
            self.description,
            ledger.rows,
            ledger.pool,
            self.step_time,
            self.output_lengths,
            self.speculation,
            ledger.leaving_keys,
            self.suspects.rows,
            self.suspects.is_doubted,
            (ledger.num_plans, ledger.num_settled, len(self.in_flight), len(ledger.next_plan.ending_rows)),
        )

    def takes_plan(self, limits: CoreLimits) -> bool:
        """Few plans are unanswered, or will soon be answered."""
        if len(self.in_flight) >= self.description.max_plans_in_flight:
            return False
        ahead_ns = sum(step.predicted_ns for step in self.in_flight)
        return len(self.in_flight) < limits.max_plans_in_flight or ahead_ns < limits.run_ahead_s * 1e9

    def inherit(self, before: "Attachment") -> None:
        """Takes over what was learned and what was not sent yet."""
        self.ledger.next_plan.forgets.extend(before.ledger.next_plan.forgets)
        self.output_lengths = before.output_lengths
        if before.description.incarnation == self.description.incarnation:
            self.step_time = before.step_time
            self.speculation.inherit(before.speculation)
            self.draining, self.leaving = before.draining, before.leaving
            self.suspects.inherit(before.suspects)

    def await_result(self, plan: BatchPlan, decision: Decision) -> None:
        """Call it when the ledger has made the plan of the decision."""
        room = decision.room
        for admission in decision.work.admissions:
            self.speculation.acceptance.begin(admission.fit.row)
            self.suspects.placed(admission.fit.row, admission.live)
        if self.speculation.max_drafts:
            self.speculation.planned(int(plan.num_draft_tokens.sum()))
        self.in_flight.append(
            StepInFlight(
                step_id=plan.step_id,
                index=decision.rows,
                num_scheduled_after=self.ledger.rows.num_scheduled[decision.rows],
                num_scheduled=plan.num_scheduled_tokens,
                num_drafts=plan.num_draft_tokens,
                released_rows=tuple(release.row for release in plan.releases),
                num_preempted=len(room.preemptions) + len(room.share_preemptions),
                grant_hash=self.ledger.grant_hash,
                num_tokens=room.budget.num_tokens,
                num_pairs=room.budget.num_pairs,
                predicted_ns=plan.predicted_ns,
            )
        )

    def end_row(self, row: int, final: FinalRelease) -> None:
        if self.ledger.end_row(row, final) and final.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.output_lengths.observe(final.num_output_tokens)

    def unanswered_steps(self) -> tuple[UnansweredStep[LiveRequest], ...]:
        """Oldest first, also of a lost executor."""
        return (*self.suspects.unanswered, *(self._unanswered(step) for step in self.in_flight))

    def _unanswered(self, step: StepInFlight) -> UnansweredStep[LiveRequest]:
        found = zip(step.index.tolist(), step.num_scheduled_after.tolist(), strict=True)
        positions = ((self.ledger.rows.live[row], position) for row, position in found)
        ours = tuple((live, position) for live, position in positions if live is not None and not live.is_orphan)
        return UnansweredStep(step.step_id, ours, is_lone=len(step.index) == 1)
