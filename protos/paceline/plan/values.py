"""The values of the plan protocol, each once, named as in `plan.proto`: what schedulers and executors tell each other.

Knows numpy columns and plain numbers. Knows neither bytes on the wire (`codec`), nor gRPC, nor what either side does
with a value. The scheduler's core and the executor's rows work on these as they are.

A column is an array with one element per row, grant, copy or tag; columns that belong together have the same length.
What the .proto calls `id` is `record_id` here, since `id` is a builtin of Python.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

import numpy as np
import numpy.typing as npt

from paceline.plan.sampling import NO_DEFAULTS, GenerationDefaults, SamplingParams
from paceline.plan.versions import PROTOCOLS, ProtocolRange

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]

NO_COLUMN: Int32Array = np.zeros(0, dtype=np.int32)
NO_COLUMN.setflags(write=False)

KEY_BYTES = 16  # of a prefix-cache key
NO_KEY = bytes(KEY_BYTES)  # takes a block's prefix-cache key away

MAX_TERM = 2**48  # far above use, since each successor adds one, and far below its type: none is left above the highest
MAX_TERM_RISE = 2**40  # of one hello: others can rise above a stray one
MAX_BLOCKS = 1 << 22  # of an executor: 64 million tokens in blocks of 16


class FinishReason(IntEnum):
    """Why a completion ended; the numbers are those of paceline.v1.FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


class RowFinish(IntEnum):
    """Whether and why a row ended on the device; the numbers are those of paceline.v1.RowFinish."""

    GOES_ON = 0
    END_TOKEN = 1
    LENGTH = 2
    CONTEXT_FULL = 3
    ERROR = 4


FINISH_REASONS = {
    RowFinish.GOES_ON: FinishReason.NONE,
    RowFinish.END_TOKEN: FinishReason.STOP,
    RowFinish.LENGTH: FinishReason.LENGTH,
    RowFinish.CONTEXT_FULL: FinishReason.LENGTH,
    RowFinish.ERROR: FinishReason.ERROR,
}
"""What the client is told of a row that ended on the device."""


# Names and parameters of requests


@dataclass(frozen=True, slots=True)
class RecordId:
    """What identifies one completion of a request: the request's id inside its tenant, and the completion's number.

    For everything below the edge each completion is a request of its own. A request with one has index 0.
    """

    tenant: str
    request_id: str
    index: int = 0

    @property
    def whole(self) -> tuple[str, str]:
        """What all completions of the request have in common."""
        return self.tenant, self.request_id


# Log-probabilities


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token there and the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log-probabilities of tokens that follow one another; the first is token `offset` of the output, or the prompt."""

    offset: int
    logprobs: Float32Array  # [num_tokens]
    top_token_ids: Int32Array  # [num_tokens, num_top], best first
    top_logprobs: Float32Array  # [num_tokens, num_top]

    @property
    def num_tokens(self) -> int:
        """How many tokens these are of."""
        return self.logprobs.size

    @property
    def num_top(self) -> int:
        """How many alternatives stand beside each token."""
        return int(self.top_token_ids.shape[1])

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.offset + self.num_tokens

    @property
    def bytes_per_token(self) -> int:
        """The memory of one token's."""
        return 4 + 8 * self.num_top

    @property
    def nbytes(self) -> int:
        """The memory of all of them."""
        return self.num_tokens * self.bytes_per_token

    def up_to(self, num_tokens: int) -> "LogprobColumns":
        """Return a copy of what belongs to the first `num_tokens` tokens of the whole output."""
        kept = slice(0, max(0, num_tokens - self.offset))
        return LogprobColumns(
            offset=min(self.offset, num_tokens),
            logprobs=self.logprobs[kept].copy(),
            top_token_ids=self.top_token_ids[kept].copy(),
            top_logprobs=self.top_logprobs[kept].copy(),
        )

    def split(self, num_tokens: int) -> tuple["LogprobColumns", "LogprobColumns"]:
        """Return views of the first `num_tokens` of these tokens and of the rest."""
        num_tokens = min(num_tokens, self.num_tokens)
        return self._part(slice(0, num_tokens)), self._part(slice(num_tokens, self.num_tokens))

    def _part(self, part: slice) -> "LogprobColumns":
        offset = self.offset + part.start
        return LogprobColumns(offset, self.logprobs[part], self.top_token_ids[part], self.top_logprobs[part])

    def of(self, offset: int, token_ids: Int32Array) -> tuple[TokenLogprobs, ...]:
        """Return those of these tokens, the first of which is token `offset`; all must be here."""
        start = offset - self.offset
        assert 0 <= start <= start + len(token_ids) <= len(self.logprobs), "log-probabilities of every token"
        index = slice(start, start + len(token_ids))
        tops = zip(self.top_token_ids[index].tolist(), self.top_logprobs[index].tolist(), strict=True)
        drawn = zip(token_ids.tolist(), self.logprobs[index].tolist(), tops, strict=True)
        return tuple(TokenLogprobs(token, logprob, tuple(zip(*top, strict=True))) for token, logprob, top in drawn)


def joined(parts: Sequence[LogprobColumns]) -> LogprobColumns:
    """Return columns that follow one another as one."""
    return LogprobColumns(
        offset=parts[0].offset,
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_token_ids=np.concatenate([part.top_token_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of some tokens of a row.

    In `StepResult.logprobs` they are those of all its tokens of the step, and `columns.offset` is 0; in
    `StepResult.prompt_logprobs` those of a chunk of its prompt, and the offset is the chunk's place in the prompt.
    """

    row: int
    token_ids: Int32Array  # [num_tokens]
    columns: LogprobColumns


# The plan


@dataclass(frozen=True, slots=True)
class BlockGrants:
    """Cells of block tables: `block_ids[i]` at index `indices[i]` of the table of `rows[i]`."""

    rows: Int32Array
    indices: Int32Array
    block_ids: Int32Array


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Whole-block copies, `sources[i]` to `destinations[i]`, which are granted in the same plan."""

    sources: Int32Array
    destinations: Int32Array

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> "BlockCopies":
        """Return the columns of (source, destination) pairs."""
        columns = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        return cls(np.ascontiguousarray(columns[:, 0]), np.ascontiguousarray(columns[:, 1])) if pairs else NO_COPIES

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.sources.tolist(), self.destinations.tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class BlockTags:
    """Prefix-cache keys of full blocks; `NO_KEY` takes one away."""

    block_ids: Int32Array
    keys: bytes  # KEY_BYTES per block

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, bytes]]) -> "BlockTags":
        """Return the columns of (block, key) pairs."""
        pairs = tuple(pairs)
        block_ids = np.array([block for block, _ in pairs], dtype=np.int32)
        return cls(block_ids, b"".join(key for _, key in pairs)) if pairs else NO_TAGS

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        starts = range(0, len(self.keys), KEY_BYTES)
        return zip(self.block_ids.tolist(), (self.keys[start : start + KEY_BYTES] for start in starts), strict=True)


NO_GRANTS = BlockGrants(NO_COLUMN, NO_COLUMN, NO_COLUMN)
NO_COPIES = BlockCopies(NO_COLUMN, NO_COLUMN)
NO_TAGS = BlockTags(NO_COLUMN, b"")


@dataclass(frozen=True, slots=True)
class FinalRelease:
    """How a request ended: the length to which its record is cut, and the reason its client is told."""

    num_output_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Release:
    """Takes a row off the device: with `final` the request is over, without it was preempted and keeps its record."""

    row: int
    final: FinalRelease | None


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Puts a request on a row. `num_cached_tokens` is where computing starts: they are in shared blocks already."""

    row: int
    record_id: RecordId
    attempt: int
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array  # of earlier attempts
    num_cached_tokens: int
    sampling: SamplingParams
    end_token_ids: tuple[int, ...]
    max_tokens: int
    num_logprobs: int | None
    context: bytes  # for a successor of the scheduler; executors do not read it
    min_tokens: int = 0
    num_prompt_logprobs: int | None = None
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()  # each way to spell a bad word
    ignored_end_token_ids: tuple[int, ...] = ()  # end tokens of the model that do not end the row
    unsupported_fields: tuple[str, ...] = ()  # names of fields that are set, and that no executor honours yet
    trace_parent: str = ""  # of W3C, for log lines
    structured: bytes = b""  # a StructuredOutput that the output keeps to; empty: any


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step of one executor: what changes, in plan order, then the rows that run. Without rows it only changes.

    Order on the device: tags, releases, copies, new requests and grants, then the forward pass.
    """

    incarnation: int
    epoch: int
    step_id: int
    rows: Int32Array = field(default_factory=lambda: NO_COLUMN)
    num_scheduled_tokens: Int32Array = field(default_factory=lambda: NO_COLUMN)  # [num_rows], drafts included
    predicted_ns: int = 0
    tags: BlockTags = NO_TAGS
    releases: tuple[Release, ...] = ()
    forget: tuple[RecordId, ...] = ()
    copies: BlockCopies = NO_COPIES
    new_requests: tuple[NewRequest, ...] = ()
    grants: BlockGrants = NO_GRANTS
    shared: BlockGrants = NO_GRANTS
    num_draft_tokens: Int32Array = field(default_factory=lambda: NO_COLUMN)  # [num_rows], or empty when nobody drafts
    min_draft_chance: float = 0.0  # that a draft is right; those less likely are not worth verifying
    draft_spare_ns: int = 0  # beyond predicted_ns, for what a drafter lacks of rows that want drafts
    unsupported_fields: tuple[str, ...] = ()  # names of fields that are set, and that no executor acts on yet

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return int(self.num_scheduled_tokens.sum())


# The result


@dataclass(frozen=True, slots=True)
class RowError:
    """A row that failed alone: a code of google.rpc, a reason for programs, a sentence, and the field at fault."""

    row: int
    code: int
    reason: str
    message: str
    field: str | None = None


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where the time of a step went, in nanoseconds."""

    waited_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    idle_ns: int = 0
    draft_ns: int = 0

    @property
    def busy_ns(self) -> int:
        """The time the device was occupied by the step."""
        return self.prepare_ns + self.forward_ns + self.sample_ns + self.draft_ns


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: `num_accepted[i]` of the `token_ids` belong to `rows[i]`, row after row."""

    incarnation: int
    epoch: int
    step_id: int
    rows: Int32Array  # [num_rows], as in the plan
    num_accepted: Int32Array  # [num_rows]
    token_ids: Int32Array  # [sum(num_accepted)]
    finishes: UInt8Array  # [num_rows] RowFinish, also of rows that ended in an earlier step
    grant_hash: int
    timings: StepTimings = StepTimings()
    logprobs: tuple[RowLogprobs, ...] = ()
    errors: tuple[RowError, ...] = ()
    prompt_logprobs: tuple[RowLogprobs, ...] = ()
    num_draft_tokens: Int32Array = field(default_factory=lambda: NO_COLUMN)  # [num_rows] verified ones, or empty


# The snapshot


@dataclass(frozen=True, slots=True)
class RowState:
    """One completion of a request as the executor knows it; `row` is None when only its record is kept."""

    record_id: RecordId
    row: int | None
    attempt: int
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array
    num_computed_tokens: int
    block_ids: Int32Array
    finish: RowFinish = RowFinish.GOES_ON
    released: FinalRelease | None = None
    max_tokens: int = 0
    sampling: SamplingParams | None = None  # as placed; None in what continues a state
    end_token_ids: tuple[int, ...] = ()
    context: bytes = b""
    logprobs: LogprobColumns | None = None  # up to the end of the output, where they were asked for
    continues: bool = False  # more columns of this request follow in the next state

    @property
    def is_open_record(self) -> bool:
        """Whether it left its row without an end: it waited to be placed again, here or elsewhere."""
        return self.row is None and self.released is None

    def has_logprobs_from(self, offset: int) -> bool:
        """Tell whether there are log-probabilities of every output token from `offset` on."""
        num_output = len(self.output_token_ids)
        return offset >= num_output or (
            self.logprobs is not None and self.logprobs.offset <= offset and self.logprobs.end == num_output
        )


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part of an executor's state at an accepted Attach. Only the last one says how many there are, with itself."""

    rows: tuple[RowState, ...] = ()
    tags: BlockTags = NO_TAGS
    num_parts: int = 0


# Attaching


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """What schedulers are compared by: the term, then who asks. `address` is where clients reach the scheduler, as
    `host:port`; empty when it did not say."""

    term: int
    scheduler_id: str
    address: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Name the scheduler as people can find it."""
        return f"{self.address or f'scheduler {self.scheduler_id}'} (term {self.term})"


class Approach(Enum):
    """How a scheduler comes to a driven executor; TAKE_OVER displaces a live one of a lower claim."""

    WAIT = "wait"
    TAKE_OVER = "take over"


@dataclass(frozen=True, slots=True)
class Hello:
    """Asks to drive an executor; with `takeover` it displaces a live holder of a lower claim."""

    claim: Claim
    protocols: ProtocolRange = PROTOCOLS
    takeover: bool = False
    tag_key_digest: bytes = b""  # empty: the scheduler uses the executor's key


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life; an executor names the step it runs and for how long, 0 when idle."""

    running_step_id: int = 0
    running_ns: int = 0


@dataclass(frozen=True, slots=True)
class WaitingInLine:
    """Another scheduler holds the executor."""

    holder: Claim


@dataclass(frozen=True, slots=True)
class Model:
    """A model as an executor describes it."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    num_parameters: int = 0
    quantization: str = ""  # empty when unquantised
    end_token_ids: tuple[int, ...] = ()
    has_chat_template: bool = False
    default_sampling: GenerationDefaults = NO_DEFAULTS
    has_dummy_weights: bool = False  # random numbers, for benchmarks
    weight_bytes: int = 0  # of an executor's memory
    weights_digest: str = ""  # empty when unknown
    num_ranks: int = 1  # of an executor: processes that share each layer
    structured_output: str = ""  # what holds outputs to a form, with its version; empty: nothing does


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The shape of the paged KV cache."""

    num_blocks: int
    block_size: int
    bytes_per_block: int = 0
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """Bounds that plans keep to."""

    max_num_rows: int
    max_num_batched_tokens: int
    max_model_len: int
    max_plans_in_flight: int
    max_num_draft_tokens: int = 0  # of a row and step; 0: it cannot draft


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A step time that the executor measured while warming up."""

    num_tokens: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Of captured steps, ascending: a step costs what the smallest costs that holds it."""

    num_rows: tuple[int, ...]  # of steps that only decode
    num_tokens: tuple[int, ...]  # of all others


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that failed as a whole on an executor; the message is for the clients of its requests."""

    epoch: int
    step_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Accepts a scheduler; the snapshot follows. `failed_step` is the last one since the executor booted."""

    incarnation: int
    epoch: int
    protocol: int
    model: Model
    geometry: KvGeometry
    limits: ExecutorLimits
    tag_key: bytes
    tokenizer_digest: str = ""
    step_points: tuple[StepPoint, ...] = ()
    failed_step: FailedStep | None = None
    graphs: GraphSizes | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """The executor is going away: place nothing new there."""

    reason: str
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What GetInfo says of who an executor is and who drives it; `holder_scheduler_id` is empty when nobody does.

    An executor of an earlier release does not name its tokenizer, nor say how many schedulers are queued.
    """

    incarnation: int
    term: int
    holder_scheduler_id: str
    vocab_size: int = 0
    tokenizer_digest: str = ""
    num_waiting_schedulers: int = 0


ToExecutor = Hello | Heartbeat | BatchPlan
FromExecutor = WaitingInLine | Welcome | SnapshotPart | StepResult | Heartbeat | Drain
