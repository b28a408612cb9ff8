"""What the core is told about an executor when it attaches: its model, its bounds and a snapshot of its state."""

from dataclasses import dataclass

from paceline_scheduler.core.logprobs import LogprobColumns
from paceline_scheduler.core.plan import BlockTag, FinalRelease, NewRequest, RowFinish
from paceline_scheduler.core.request import Int32Array, RecordId, Request


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A step time measured by the executor during warm-up."""

    num_tokens: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that failed as a whole on an executor; the message is for the clients of its requests."""

    epoch: int
    step_id: int
    message: str


@dataclass(frozen=True, slots=True)
class ExecutorDescription:
    """An executor as its Welcome describes it. `address` identifies it for the scheduler.

    `failed_step` is the last one that failed since the executor booted, whoever planned it.
    """

    address: str
    incarnation: int
    epoch: int
    model: str
    num_blocks: int
    block_size: int
    max_num_rows: int
    max_num_batched_tokens: int
    max_model_len: int
    max_plans_in_flight: int
    tag_key: bytes
    step_points: tuple[StepPoint, ...] = ()
    failed_step: FailedStep | None = None

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of one request at most. The last output token is never computed and needs no slot."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a scheduler left with an executor about a request it placed, for whoever drives the executor next.

    `request` has neither handle nor deadline; `deadline_left_s` and `waited_s` are of the moment it was placed.
    """

    request: Request
    waited_s: float
    deadline_left_s: float | None
    num_preemptions: int
    num_executor_deaths: int
    last_death_offset: int | None
    num_prompt_cached_tokens: int


def carried_with(placement: NewRequest) -> RequestContext:
    """Return what is left with an executor when a request is placed there."""
    return RequestContext(
        request=placement.request,
        waited_s=placement.waited_s,
        deadline_left_s=placement.deadline_left_s,
        num_preemptions=placement.num_preemptions,
        num_executor_deaths=placement.num_executor_deaths,
        last_death_offset=placement.last_death_offset,
        num_prompt_cached_tokens=placement.num_prompt_cached_tokens,
    )


@dataclass(frozen=True, slots=True)
class RowState:
    """One completion of a request as the executor knows it; `row` is None when only its record is kept.

    `carried` is None where it cannot be read: another version of this program wrote it.
    """

    key: RecordId
    row: int | None
    attempt: int
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array
    num_computed_tokens: int
    block_ids: Int32Array
    finish: RowFinish
    released: FinalRelease | None
    logprobs: LogprobColumns | None = None  # up to the end of the output, where they were asked for
    carried: RequestContext | None = None

    def has_logprobs_from(self, offset: int) -> bool:
        """Tell whether there are log-probabilities of every output token from `offset` on."""
        num_output = len(self.output_token_ids)
        return offset >= num_output or (
            self.logprobs is not None and self.logprobs.offset <= offset and self.logprobs.end == num_output
        )

    def is_of(self, request: Request) -> bool:
        """Tell whether it is this request, and not another one of the same id."""
        return self.carried is None or self.carried.request.body_digest == request.body_digest

    @property
    def is_open_record(self) -> bool:
        """Whether it left its row without an end: it waited to be placed again, here or elsewhere."""
        return self.row is None and self.released is None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an executor at an accepted Attach."""

    rows: tuple[RowState, ...] = ()
    tags: tuple[BlockTag, ...] = ()
