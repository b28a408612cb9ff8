"""What the core is told about an executor when it attaches: its model, its bounds and a snapshot of its state."""

from dataclasses import dataclass

from paceline_scheduler.core.logprobs import LogprobColumns
from paceline_scheduler.core.plan import BlockTag, FinalRelease, RowFinish
from paceline_scheduler.core.request import Int32Array, RequestKey


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A step time measured by the executor during warm-up."""

    num_tokens: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class ExecutorDescription:
    """An executor as its Welcome describes it. `address` identifies it for the scheduler."""

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

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of one request at most. The last output token is never computed and needs no slot."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """One completion of a request as the executor knows it; `row` is None when only its record is kept."""

    key: RequestKey
    row: int | None
    attempt: int
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array
    num_computed_tokens: int
    block_ids: Int32Array
    finish: RowFinish
    released: FinalRelease | None
    logprobs: LogprobColumns | None = None  # up to the end of the output, where they were asked for

    def has_logprobs_from(self, offset: int) -> bool:
        """Tell whether there are log-probabilities of every output token from `offset` on."""
        num_output = len(self.output_token_ids)
        return offset >= num_output or (
            self.logprobs is not None and self.logprobs.offset <= offset and self.logprobs.end == num_output
        )

    @property
    def is_open_record(self) -> bool:
        """Whether it left its row without an end: it waited to be placed again, here or elsewhere."""
        return self.row is None and self.released is None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an executor at an accepted Attach."""

    rows: tuple[RowSnapshot, ...] = ()
    tags: tuple[BlockTag, ...] = ()
