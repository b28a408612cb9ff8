"""The seam between edge and link: what the edge may ask, and what it is told.

Edge and link do not import each other; the process's composition root joins them here.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from paceline.plan.values import FinishReason, GenerationDefaults, RecordId
from paceline_scheduler.core.outputs import Outputs, Resumed
from paceline_scheduler.core.request import Request, Resumption
from paceline_scheduler.core.views import Estimate, Explanation
from paceline_scheduler.holder import Holder


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The tokenizer as an executor sends it. `json` is the tokenizers library's form."""

    digest: str
    json: bytes
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    end_token_ids: tuple[int, ...]
    add_bos: bool
    defaults: GenerationDefaults


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that attached executors serve."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    num_executors: int
    num_parameters: int
    quantization: str
    tokenizer: TokenizerSource

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an output, of those that the model can draw: a tokenizer may know more than it has."""
        return tuple(token_id for token_id in self.tokenizer.end_token_ids if token_id < self.vocab_size)


@dataclass(slots=True)
class StepTotals:
    """Sums over the finished steps of an executor; times in nanoseconds. It changes with every step.

    `starved_ns` is the part of `idle_ns` in which there was something to run, and its plan was late.
    """

    num_steps: int = 0
    num_rows: int = 0
    num_output_tokens: int = 0
    waited_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    idle_ns: int = 0
    starved_ns: int = 0
    planning_ns: int = 0


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """One executor for operators; `state` is the number of paceline.v1.ExecutorState.

    `holder` is the other scheduler that drives it while this one stands in line.
    """

    address: str
    state: int
    incarnation: int
    epoch: int
    model: str
    num_running_requests: int
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_quarantined_blocks: int
    num_filled_slots: int
    num_owned_slots: int
    num_plans_in_flight: int
    last_error: str
    steps: StepTotals
    holder: Holder | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step for operators; times in nanoseconds."""

    address: str
    epoch: int
    step_id: int
    num_rows: int
    num_tokens: int
    num_output_tokens: int
    predicted_ns: int
    waited_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    idle_ns: int
    planning_ns: int
    num_waiting_requests: int
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_quarantined_blocks: int


@dataclass(frozen=True, slots=True)
class LimitValues:
    """Bounds that can change while running."""

    max_num_queued_reqs: int
    max_num_queued_tokens: int
    max_num_batched_tokens: int


class Arrival(Enum):
    """How a request comes: for the first time, or its client has dealt with it before and comes back."""

    NEW = "new"
    BACK = "back"


class OutputSink(Protocol):
    """The edge's side: takes what the core produced. Called on the event loop; must not block."""

    def deliver(self, outputs: Outputs) -> None:
        """Hand new tokens and failures to their streams."""
        ...


class StepSink(Protocol):
    """A watcher of steps. Called on the event loop; must not block."""

    def step_finished(self, record: StepRecord) -> None:
        """Take one finished step."""
        ...


class Backend(Protocol):
    """What the edge may ask of the core and the link. All calls are made on the event loop and do not block."""

    def now_s(self) -> float:
        """Return the injected monotonic clock's time, in seconds: the clock of `Request.deadline_s`."""
        ...

    def require_room(self, num_requests: int) -> None:
        """Raise QueueFullError when the queue would not take so many requests, however short. Costs little."""
        ...

    def require_time(self, model: str) -> None:
        """Raise QueueFullError when nothing of usual urgency would get its first token in time. Costs little."""
        ...

    def submit(self, *requests: Request) -> None:
        """Queue all completions of a request, or none: raises a RequestRefusedError when one is not taken."""
        ...

    async def until_synced(self, arrival: Arrival) -> None:
        """Return when every executor that is looked for has told what it runs, or is lost: what was begun is known.

        Raises NoExecutorError when that does not come soon; StandbyError, at once for what is new, when another
        scheduler drives them.
        """
        ...

    def require_lead(self) -> None:
        """Raise StandbyError while another scheduler is known to drive the executors. Costs little."""
        ...

    def known(self, key: RecordId, body_digest: bytes, model: str) -> Request | None:
        """Return a request to a model that runs, waits or ran, if its body has this digest."""
        ...

    def resume(self, *resumptions: Resumption) -> tuple[Resumed, ...]:
        """Attach listeners to all completions of a request, or to none; what is not known yet is queued.

        From the return on the handles of these requests hear of everything beyond what is returned. A listener that a
        request had before hears nothing more. Raises StaleAttachmentError, ResumeMismatchError, DuplicateRequestError
        and what `submit` raises.
        """
        ...

    def detach(self, handle: int) -> None:
        """Nobody listens to a request for now: a resumable one goes on for `core.live.RESUME_WINDOW_S`, then it is
        cancelled; another one is cancelled at once. Unknown handles are ignored."""
        ...

    def end(self, handle: int, num_output_tokens: int, reason: FinishReason) -> int:
        """End a request from the edge's side: a stop text was found, or the client went away.

        Nothing more is delivered for the handle; its record is cut to `num_output_tokens`. Returns how many tokens of
        its prompt came from the prefix cache. Unknown handles are ignored: the request may just have ended by itself.
        """
        ...

    def cancel(self, key: RecordId) -> None:
        """End a request as CANCELLED; its stream is told. Raises UnknownRequestError."""
        ...

    def explain(self, key: RecordId) -> Explanation:
        """Say where a request is and what it waits for; raises UnknownRequestError."""
        ...

    def estimate(self, request: Request) -> Estimate:
        """Say what is expected of a request if it were submitted now; a refusal is part of the answer."""
        ...

    def acknowledge(self, keys: tuple[RecordId, ...]) -> None:
        """Let the executors forget the records of finished requests; unknown ones are ignored."""
        ...

    def models(self) -> tuple[ServedModel, ...]:
        """Return the models that attached executors serve now, by name."""
        ...

    def executors(self) -> tuple[ExecutorStatus, ...]:
        """Return all executors that are known."""
        ...

    def num_waiting(self) -> tuple[int, int]:
        """Return the length of the queue in requests and in prompt tokens."""
        ...

    def drain_executor(self, address: str) -> int:
        """Place nothing new on an executor; returns how many requests still run there.

        Raises KeyError if it is unknown, or was not attached yet.
        """
        ...

    def limits(self) -> LimitValues:
        """Return the bounds in force."""
        ...

    def set_limits(self, limits: LimitValues) -> None:
        """Change the bounds; values are validated by the caller."""
        ...

    def watch_steps(self, sink: StepSink) -> None:
        """Tell `sink` about every finished step until `unwatch_steps`."""
        ...

    def unwatch_steps(self, sink: StepSink) -> None:
        """Stop telling `sink`."""
        ...
