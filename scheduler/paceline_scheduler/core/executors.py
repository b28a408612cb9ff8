"""What the core knows of an executor when it attaches, and what it leaves there for its successor.

The link packs request and `History` into bytes that executors do not read.
"""

from dataclasses import dataclass, fields

from paceline.forms.library import LIBRARY
from paceline.plan.values import NO_TAGS, BlockTags, FailedStep, Int32Array, NewRequest, RowState, StepPoint, Welcome
from paceline_scheduler.core.outputs import NO_DRAFTS, DraftCounts
from paceline_scheduler.core.phases import NO_TIMES, PhaseTimes
from paceline_scheduler.core.request import Request


@dataclass(frozen=True, slots=True)
class ExecutorDescription:
    """`failed_step` is the last one since the executor booted, whoever planned it."""

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
    vocab_size: int
    step_points: tuple[StepPoint, ...] = ()
    failed_step: FailedStep | None = None
    graph_tokens: tuple[int, ...] = ()  # sizes of captured steps that hold chunks, ascending
    max_num_draft_tokens: int = 0  # of a row and step
    holds_forms: bool = False  # it masks with the library that forms are checked with here

    @classmethod
    def of(cls, address: str, welcome: Welcome) -> "ExecutorDescription":
        return cls(
            address=address,
            incarnation=welcome.incarnation,
            epoch=welcome.epoch,
            model=welcome.model.name,
            num_blocks=welcome.geometry.num_blocks,
            block_size=welcome.geometry.block_size,
            max_num_rows=welcome.limits.max_num_rows,
            max_num_batched_tokens=welcome.limits.max_num_batched_tokens,
            max_model_len=welcome.limits.max_model_len,
            max_plans_in_flight=welcome.limits.max_plans_in_flight,
            tag_key=welcome.tag_key,
            vocab_size=welcome.model.vocab_size,
            step_points=welcome.step_points,
            failed_step=welcome.failed_step,
            graph_tokens=() if welcome.graphs is None else welcome.graphs.num_tokens,
            max_num_draft_tokens=welcome.limits.max_num_draft_tokens,
            holds_forms=welcome.model.structured_output == LIBRARY,
        )

    @property
    def max_request_tokens(self) -> int:
        """The last output token is never computed and needs no slot."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


@dataclass(frozen=True, slots=True)
class History:
    """Of a request until it was placed."""

    waited_s: float = 0.0
    deadline_left_s: float | None = None
    num_preemptions: int = 0
    num_executor_deaths: int = 0
    last_death_offset: int | None = None
    num_prompt_cached_tokens: int = 0
    times: PhaseTimes = NO_TIMES
    drafts: DraftCounts = NO_DRAFTS


NO_HISTORY = History()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(NewRequest):
    request: Request
    history: History

    @classmethod
    def of(
        cls,
        request: Request,
        history: History,
        row: int,
        attempt: int,
        output_token_ids: Int32Array,
        max_tokens: int,
        num_cached_tokens: int,
    ) -> "Placement":
        return cls(
            row=row,
            record_id=request.key,
            attempt=attempt,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=output_token_ids,
            num_cached_tokens=num_cached_tokens,
            sampling=request.sampling,
            end_token_ids=request.end_token_ids,
            max_tokens=max_tokens,
            num_logprobs=request.num_logprobs,
            context=b"",
            min_tokens=request.min_tokens,
            # The client has them once there is output.
            num_prompt_logprobs=None if len(output_token_ids) else request.num_prompt_logprobs,
            bad_word_token_ids=request.bad_words,
            ignored_end_token_ids=request.ignored_end_token_ids if request.min_tokens else (),
            trace_parent=request.trace_parent,
            structured=request.structured,
            request=request,
            history=history,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRow(RowState):
    """The request is None where another version of this program wrote the context."""

    request: Request | None = None
    history: History = NO_HISTORY

    @classmethod
    def of(cls, state: RowState, request: Request | None, history: History) -> "SeenRow":
        values = {field.name: getattr(state, field.name) for field in fields(RowState)}
        return cls(**values, request=request, history=history)

    def is_of(self, request: Request) -> bool:
        """Another request may have the same id."""
        return self.request is None or self.request.body_digest == request.body_digest


@dataclass(frozen=True, slots=True)
class Snapshot:
    rows: tuple[SeenRow, ...] = ()
    tags: BlockTags = NO_TAGS
