"""What is told to those who ask about a request, an estimate or an executor."""

from dataclasses import dataclass
from enum import IntEnum

from paceline.plan.values import RecordId
from paceline_scheduler.core.outputs import NO_DRAFTS, DraftCounts
from paceline_scheduler.core.phases import PhaseTimes
from paceline_scheduler.core.tables.blocks import BlockCounts
from paceline_scheduler.errors import SchedulerError


class RequestState(IntEnum):
    """The numbers are those of paceline.v1.RequestState."""

    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4


@dataclass(frozen=True, slots=True)
class Explanation:
    """`waiting_for` and `preemption_reason` are sentences, `executor` an address; all may be empty.

    `queue_position` is 0 when it runs. No `times`: the core does not have it yet.
    """

    state: RequestState
    waiting_for: str
    queue_position: int
    num_preemptions: int
    preemption_reason: str
    executor: str
    num_computed_tokens: int
    num_output_tokens: int
    times: PhaseTimes | None = None
    drafts: DraftCounts = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class ListedRequest:
    """A completion for operators, without what was asked and answered. `time_left_s` is None without a deadline."""

    key: RecordId
    model: str
    priority: int
    num_prompt_tokens: int
    max_tokens: int | None
    has_listener: bool
    age_s: float
    time_left_s: float | None
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class ListedRequests:
    """Some requests, the oldest first. `next_after` selects those behind them; None: there are none."""

    requests: tuple[ListedRequest, ...]
    next_after: int | None


@dataclass(frozen=True, slots=True)
class Estimate:
    """With a `refusal` nothing is expected, and the times are 0."""

    time_to_first_token_s: float
    inter_token_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    refusal: SchedulerError | None


@dataclass(frozen=True, slots=True)
class ExecutorCounts:
    num_running_requests: int
    num_plans_in_flight: int
    blocks: BlockCounts
    num_filled_slots: int
    num_owned_slots: int
    draft_speedup: float
    draft_saved_ns: int
