"""What the core sends to an executor for one step, and what comes back: columns, as on the wire.

The order of the fields of a plan is the order on the device: tags, releases, copies, placements and grants, then the
forward pass.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from paceline_scheduler.core.logprobs import LogprobColumns, TokenLogprobs
from paceline_scheduler.core.request import FinishReason, Int32Array, RecordId, Request, UInt8Array

NO_COLUMN: Int32Array = np.zeros(0, dtype=np.int32)
NO_COLUMN.setflags(write=False)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request put on a row. `num_cached_tokens` is where computing starts: they are in shared blocks already."""

    row: int
    request: Request
    attempt: int
    output_token_ids: Int32Array  # [num_output_tokens] of earlier attempts
    max_tokens: int
    num_cached_tokens: int
    num_prompt_cached_tokens: int
    num_preemptions: int
    num_executor_deaths: int
    waited_s: float
    last_death_offset: int | None = None
    deadline_left_s: float | None = None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives of each prompt token are wanted; None where the client has them, or wants none."""
        return None if len(self.output_token_ids) else self.request.num_prompt_logprobs


@dataclass(frozen=True, slots=True)
class FinalRelease:
    """How a request ended: the length of its output and the reason its client is told."""

    num_output_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Release:
    """A row taken off the device: with `final` the request is over, without it was preempted."""

    row: int
    final: FinalRelease | None


NO_KEY = bytes(16)
"""Takes a block's prefix-cache key away."""


class BlockTag(NamedTuple):
    """A prefix-cache key given to a full block."""

    block_id: int
    key: bytes


class BlockCopy(NamedTuple):
    """A block whose contents go to another one, which is granted in the same plan."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class BlockGrants:
    """Entries of block tables: three columns of the same length."""

    rows: Int32Array
    indices: Int32Array
    block_ids: Int32Array


NO_GRANTS = BlockGrants(NO_COLUMN, NO_COLUMN, NO_COLUMN)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step of one executor. A plan without rows only changes state."""

    incarnation: int
    epoch: int
    step_id: int
    rows: Int32Array
    num_scheduled_tokens: Int32Array
    predicted_ns: int
    tags: tuple[BlockTag, ...] = ()
    releases: tuple[Release, ...] = ()
    placements: tuple[NewRequest, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    grants: BlockGrants = NO_GRANTS
    shared: BlockGrants = NO_GRANTS
    forget: tuple[RecordId, ...] = ()
    num_draft_tokens: Int32Array = field(default_factory=lambda: NO_COLUMN)  # [num_rows], or empty: nobody drafts

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return int(self.num_scheduled_tokens.sum())


class RowFinish(IntEnum):
    """Whether a row ended on the device; the numbers are those of paceline.v1.RowFinish."""

    NONE = 0
    END_TOKEN = 1
    LENGTH = 2
    CONTEXT_FULL = 3
    ERROR = 4


FINISH_REASONS = {
    RowFinish.NONE: FinishReason.NONE,
    RowFinish.END_TOKEN: FinishReason.STOP,
    RowFinish.LENGTH: FinishReason.LENGTH,
    RowFinish.CONTEXT_FULL: FinishReason.LENGTH,
    RowFinish.ERROR: FinishReason.ERROR,
}


@dataclass(frozen=True, slots=True)
class RowError:
    """A row that failed alone: the executor's upper-case reason and its sentence."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where the time of a step went, in nanoseconds."""

    waited_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    idle_ns: int = 0

    @property
    def busy_ns(self) -> int:
        """The time the device was occupied by the step."""
        return self.prepare_ns + self.forward_ns + self.sample_ns


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: `num_accepted[i]` of the `token_ids` belong to `rows[i]`, row after row."""

    incarnation: int
    epoch: int
    step_id: int
    rows: Int32Array  # [num_rows], as in the plan
    num_accepted: Int32Array  # [num_rows]
    token_ids: Int32Array  # [sum(num_accepted)]
    finishes: UInt8Array  # [num_rows] RowFinish
    grant_hash: int
    timings: StepTimings
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by row
    errors: dict[int, RowError] = field(default_factory=dict)  # by row
    prompt_logprobs: dict[int, LogprobColumns] = field(default_factory=dict)  # by row; offsets are in the prompt
    num_draft_tokens: Int32Array = field(default_factory=lambda: NO_COLUMN)  # verified ones: [num_rows], or empty
