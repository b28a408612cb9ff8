"""The seam between edge, core and links, which do not import each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from paceline.plan.hashes import tokenizer_form
from paceline.plan.sampling import GenerationDefaults
from paceline.plan.values import Claim
from paceline_scheduler.core.events import Event, ReplyT
from paceline_scheduler.core.outputs import Failure, TokenOutputs
from paceline_scheduler.core.views import CoreViews
from paceline_scheduler.observers.steps import StepTotals


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """As an executor sends it. `json` is the tokenizers library's form."""

    digest: str
    json: bytes
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    end_token_ids: tuple[int, ...]
    prefix_token_ids: tuple[int, ...]  # before plain text
    suffix_token_ids: tuple[int, ...]  # behind it
    special_tokens: tuple[tuple[str, str], ...]  # names that templates know, such as bos_token, and texts
    defaults: GenerationDefaults
    default_system_text: str | None = None  # of a chat without a system message; None: its template decides
    response_template: str | None = None  # how the model marks the parts of its output, in JSON; None: it does not say
    tool_use_template: str | None = None  # of chats with tools; None: as of others

    def template_for(self, *, has_tools: bool) -> str | None:
        """As transformers chooses it; None: chats cannot be sent."""
        return (self.tool_use_template if has_tools else None) or self.chat_template

    def is_alike(self, other: "TokenizerSource") -> bool:
        """Whether a model may be served with both: one vocabulary, which executors of different releases may read in
        different ways.
        """
        same_form = tokenizer_form(self.digest) == tokenizer_form(other.digest)
        return self.digest == other.digest if same_form else self.json == other.json


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    num_executors: int
    num_parameters: int
    quantization: str
    tokenizer: TokenizerSource
    has_dummy_weights: bool = False
    weight_bytes: int = 0  # of an executor, the most where they differ; 0 when unknown
    weights_digest: str = ""  # empty when unknown
    num_ranks: int = 1  # of an executor, the most where they differ
    structured_output: str = ""  # what holds outputs to a form; empty: nothing does

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Those that the model can draw: a tokenizer may know more."""
        return tuple(token_id for token_id in self.tokenizer.end_token_ids if token_id < self.vocab_size)


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """For operators; `state` is the number of paceline.v1.ExecutorState.

    `holder` is the other scheduler that drives it while this one waits in its queue.
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
    holder: Claim | None = None
    max_num_rows: int = 0
    draft_speedup: float = 0.0
    draft_saved_ns: int = 0
    lost_for_s: float | None = None
    num_ranks: int = 0


class Arrival(Enum):
    """For the first time, or its client has dealt with it before."""

    NEW = "new"
    BACK = "back"


class OutputSink(Protocol):
    """Called on the event loop; must not block."""

    def deliver(self, tokens: Sequence[TokenOutputs], failures: Sequence[Failure]) -> None: ...


class Backend(Protocol):
    """The core, as the edge uses it. Called on the event loop; does not block."""

    @property
    def views(self) -> CoreViews: ...

    def feed(self, event: Event[ReplyT]) -> ReplyT:
        """What it raises, as `core.events` says of each event, changed nothing."""
        ...

    def now_s(self) -> float:
        """Returns seconds of the injected monotonic clock, as in `Request.deadline_s`."""
        ...


class Executors(Protocol):
    """The links tell what they know of executors. Called on the event loop; does not block."""

    async def until_synced(self, arrival: Arrival) -> None:
        """Return when every expected executor has told what it runs, or is lost. Raises NoExecutorError when that does
        not come soon, StandbyError when another scheduler drives them.
        """
        ...

    def require_lead(self) -> None:
        """Raise StandbyError while another scheduler is known to drive the executors. Costs little."""
        ...

    def models(self) -> tuple[ServedModel, ...]:
        """Those that attached executors serve now, by name."""
        ...

    def known_models(self) -> tuple[ServedModel, ...]:
        """Also those of executors that are away, as served by 0."""
        ...

    @property
    def may_come(self) -> bool:
        """Whether an executor that is looked for has not said yet what it serves."""
        ...

    async def until(self, holds: Callable[[], bool]) -> None:
        """Asks again whenever any of this changes."""
        ...

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        """Of all that are looked for, by address."""
        ...


class PlanRecording(Protocol):
    """Recordings of plans and results, one at a time, in the scheduler's own folder."""

    def start(self, name: str, *, is_raw: bool) -> None:
        """Begin a recording, and end the one before. Raises InvalidRequestError."""
        ...

    def stop(self) -> None: ...
