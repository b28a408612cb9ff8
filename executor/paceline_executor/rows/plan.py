"""The plan and its result as the executor works on them: frozen columns instead of protobuf messages.

Knows shapes and meanings, checks nothing: `table` does. A column is an int32 array, one element per row, grant, copy or
tag; columns that belong together have the same length in a well-formed plan.
"""

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline_executor.errors import RequestError
from paceline_executor.rows.logprobs import OutputLogprobs
from paceline_executor.runner.interface import Int32Array, PromptLogprobs, TokenLogprobs

ByteArray = npt.NDArray[np.uint8]

TAG_BYTES = 16


def empty_column() -> Int32Array:
    """A column without elements."""
    return np.empty(0, dtype=np.int32)


class RowFinish(enum.IntEnum):
    """Whether and why a row ended on the device; the numbers are the protocol's."""

    GOES_ON = 0
    END_TOKEN = 1
    LENGTH = 2
    CONTEXT_FULL = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class RecordId:
    """What a completion of a request is called: the request's id inside its tenant, and which completion it is."""

    tenant: str
    request_id: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a row draws tokens, defaults filled in. temperature 0 is greedy, top_k 0 keeps all tokens."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # 0 to 2^64 - 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, each once, and what is added to their logits
    allowed_token_ids: tuple[int, ...] = ()  # empty: all


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as it is put on a row; kept unchanged while it is there."""

    row: int
    record_id: RecordId
    attempt: int
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array  # of earlier attempts
    num_cached_tokens: int
    sampling: SamplingParams
    unsupported_fields: tuple[str, ...]  # names of fields that are set but not honoured yet
    end_token_ids: tuple[int, ...]
    max_tokens: int
    num_logprobs: int | None
    context: bytes
    sampling_message: bytes  # the sampling parameters as sent, for the snapshot
    min_tokens: int = 0
    ignored_end_token_ids: tuple[int, ...] = ()  # end tokens of the model that do not end the row
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of each way to spell one
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class FinalRelease:
    """How a request ended: the length its record is cut to, and the finish reason by the protocol's number."""

    num_output_tokens: int
    reason: int


@dataclass(frozen=True, slots=True)
class Release:
    """Takes a row off the device; without `final` it is a preemption and the record stays whole."""

    row: int
    final: FinalRelease | None


@dataclass(frozen=True, slots=True)
class BlockGrants:
    """Cells of block tables: `block_ids[i]` at index `indices[i]` of the table of `rows[i]`."""

    rows: Int32Array
    indices: Int32Array
    block_ids: Int32Array


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Whole-block copies, `sources[i]` to `destinations[i]`."""

    sources: Int32Array
    destinations: Int32Array


@dataclass(frozen=True, slots=True)
class BlockTags:
    """Prefix-cache keys of blocks; a key of zeros removes."""

    block_ids: Int32Array
    keys: bytes  # TAG_BYTES per block


NO_GRANTS = BlockGrants(empty_column(), empty_column(), empty_column())
NO_COPIES = BlockCopies(empty_column(), empty_column())
NO_TAGS = BlockTags(empty_column(), b"")


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step: what changes, in the order of the fields, then which rows run."""

    incarnation: int
    epoch: int
    step_id: int
    tags: BlockTags = NO_TAGS
    releases: tuple[Release, ...] = ()
    forget: tuple[RecordId, ...] = ()
    copies: BlockCopies = NO_COPIES
    placements: tuple[NewRequest, ...] = ()
    grants: BlockGrants = NO_GRANTS
    shared: BlockGrants = NO_GRANTS
    rows: Int32Array = field(default_factory=empty_column)
    num_scheduled_tokens: Int32Array = field(default_factory=empty_column)
    num_draft_tokens: Int32Array = field(default_factory=empty_column)
    predicted_ns: int = 0


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that failed alone, and why."""

    row: int
    error: RequestError


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of the token a row drew."""

    row: int
    token_id: int
    values: TokenLogprobs


@dataclass(frozen=True, slots=True)
class RowPromptLogprobs:
    """Log-probabilities of prompt tokens of a row, from `position` on."""

    row: int
    position: int  # in the prompt, of the first of them; at least 1
    token_ids: Int32Array  # [num_tokens]
    values: PromptLogprobs


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where the time of a step went, in nanoseconds."""

    waited_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    idle_ns: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: columns over the plan's rows, `token_ids` row after row."""

    epoch: int
    step_id: int
    rows: Int32Array
    num_accepted: Int32Array
    token_ids: Int32Array
    finishes: ByteArray  # a RowFinish per row, also of rows that ended in an earlier step
    logprobs: tuple[RowLogprobs, ...]
    faults: tuple[RowFault, ...]
    grant_hash: int
    prompt_logprobs: tuple[RowPromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RowState:
    """One request as the executor knows it, on a row or, with `row` None, as a record. Arrays are copies."""

    record_id: RecordId
    row: int | None
    attempt: int
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array
    num_computed_tokens: int
    block_ids: Int32Array
    finish: RowFinish
    released: FinalRelease | None
    max_tokens: int
    sampling_message: bytes
    end_token_ids: tuple[int, ...]
    context: bytes
    logprobs: OutputLogprobs | None = None  # up to the end of the output; None when they were not asked for
    continues: bool = False  # more columns of this request follow in the next state
