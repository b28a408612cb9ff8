"""A request between submission and its end: the core's own, changing view of it."""

from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from paceline.plan.values import FinalRelease, FinishReason, Int32Array, TokenLogprobs
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.outputs import DraftCounts, FinishNotice
from paceline_scheduler.core.phases import PhaseClock
from paceline_scheduler.core.prefix import PrefixChain
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.retained import RetainedOutput
from paceline_scheduler.core.suspects import Suspicion

PATIENCE_S = 30.0
"""A request without a deadline is as urgent as if due after this; so is a step of priority."""

RESUME_WINDOW_S = 30.0
"""A resumable request goes on for so long without a listener."""

ABANDONED_AFTER_S = 3.0
"""The same where it keeps others waiting."""

MAX_LEFT_S = 0.5
"""To better executors: then whoever can takes it, as forecasts might go back and forth."""

MAX_WAITED_S = 60.0
"""A client may claim at most this: it sets the queue key."""

MAX_PROMPT_LOGPROBS_CHUNK = 64
"""The step-time model does not know such rows: so few keep a step near its prediction."""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


QueueKey = tuple[float, int]


def queue_key_of(request: Request, arrival_number: int, submitted_s: float) -> QueueKey:
    """The earliest deadline comes first within a priority. The key never changes. It holds the time of submission, so
    nothing starves whatever its priority.
    """
    due_s = submitted_s + PATIENCE_S
    if request.deadline_s is not None:
        due_s = min(due_s, request.deadline_s)
    return due_s + request.priority * PATIENCE_S, arrival_number


@dataclass(frozen=True, slots=True)
class HeldRow:
    address: str
    row: int


@dataclass(frozen=True, slots=True)
class Meant:
    """For this executor, until it has planned again; `num_tokens` are to be computed there."""

    address: str
    num_plans: int  # that it had made
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Left:
    """`meant` is None where few executors choose anew in each plan."""

    since_s: float
    meant: Meant | None


@dataclass(slots=True)
class Preemptions:
    count: int = 0
    is_planned: bool = False  # counted when confirmed: the plan may never run
    reason: str = ""  # for people

    def plan(self, reason: str) -> None:
        self.is_planned, self.reason = True, reason

    def confirm(self) -> None:
        self.count += self.is_planned
        self.is_planned = False


@dataclass(slots=True)
class EndRecord:
    address: str | None = None  # that was told how it ended
    is_acknowledged: bool = False  # nobody needs it


@dataclass(slots=True, eq=False)
class LiveRequest:
    """What changes rarely; what changes every step is in the columns of its row."""

    request: Request
    queue_key: QueueKey
    phases: PhaseClock
    status: Status = Status.WAITING
    attempt: int = 0
    held: HeldRow | None = None
    output: RetainedOutput = field(default_factory=RetainedOutput)  # up to date while off a row
    num_prompt_cached_tokens: int | None = None  # at its first placement
    preemptions: Preemptions = field(default_factory=Preemptions)
    suspicion: Suspicion = field(default_factory=Suspicion)
    left: Left | None = None  # to a better executor
    detached_until_s: float | None = None  # no listener; ends then
    final: FinalRelease | None = None
    record: EndRecord = field(default_factory=EndRecord)
    is_orphan: bool = False  # on a row where nobody asks for it: it only has to leave

    def is_abandoned(self, now: float) -> bool:
        return self.detached_until_s is not None and now >= self.detached_until_s - RESUME_WINDOW_S + ABANDONED_AFTER_S

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output.token_ids)

    @property
    def address(self) -> str | None:
        return None if self.held is None else self.held.address

    def off_row_with(self, output_token_ids: Int32Array) -> "LiveRequest":
        return replace(self, output=replace(self.output, token_ids=output_token_ids))

    def left_behind(self) -> "LiveRequest":
        """Nothing that becomes of the orphan has an effect on the request."""
        return replace(
            self,
            status=Status.FINISHED,
            output=replace(self.output),
            phases=replace(self.phases),
            preemptions=replace(self.preemptions),
            suspicion=replace(self.suspicion),
            final=FinalRelease(self.num_output_tokens, FinishReason.ERROR),
            record=replace(self.record),
            is_orphan=True,
        )

    def was_left_long(self, now: float) -> bool:
        return self.left is not None and now - self.left.since_s > MAX_LEFT_S

    def leave_to_others(self, now: float, meant: Meant | None) -> None:
        self.left = Left(now if self.left is None else self.left.since_s, meant)

    @property
    def is_suspect(self) -> bool:
        return self.suspicion.is_suspect(self.num_output_tokens)

    @property
    def had_listener(self) -> bool:
        return self.request.handle >= 0

    @property
    def num_known_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_own_tokens(self) -> int:
        """To compute if nothing is cached, while off a row. Later completions find all of the prompt but its last
        token.
        """
        is_sharing = self.request.key.index > 0 and not self.computes_all
        return self.num_output_tokens + (1 if is_sharing else self.num_prompt_tokens)

    @property
    def largest_chunk(self) -> int:
        """Each prompt token with log-probabilities costs a row of logits."""
        return MAX_PROMPT_LOGPROBS_CHUNK if self.request.num_prompt_logprobs is not None else self.num_known_tokens

    def least_rest_on(self, description: ExecutorDescription) -> int:
        """Further output tokens before it can end there, while off a row."""
        least = min(self.request.min_tokens, self.max_tokens_on(description))
        return max(1, least - self.num_output_tokens)

    @property
    def computes_all(self) -> bool:
        """Log-probabilities of its whole prompt are due."""
        owes_logprobs = self.request.num_prompt_logprobs is not None and not self.num_output_tokens
        return self.request.bypass_prefix_cache or owes_logprobs

    @property
    def num_placed_bytes(self) -> int:
        return 4 * self.num_known_tokens + len(self.request.origin) + len(self.request.structured)

    def fits(self, description: ExecutorDescription) -> bool:
        """An empty executor could run it to its end."""
        wanted = self.request.max_tokens
        needed = self.num_known_tokens + 1 if wanted is None else self.num_prompt_tokens + wanted
        if self.request.structured and not description.holds_forms:
            return False
        return description.model == self.request.model and needed <= description.max_request_tokens

    def max_tokens_on(self, description: ExecutorDescription) -> int:
        return self.request.max_tokens or description.max_request_tokens - self.num_prompt_tokens

    def max_drafts_on(self, description: ExecutorDescription, limits: CoreLimits) -> int:
        wanted, allowed = self.request.max_num_draft_tokens, limits.max_num_draft_tokens
        most = min(description.max_num_draft_tokens, allowed)
        return most if wanted is None else min(most, wanted)

    def known_token_ids(self) -> Int32Array:
        return np.concatenate((self.request.prompt_token_ids, self.output.token_ids))

    def prefix_chain(self, tag_key: bytes, block_size: int) -> PrefixChain:
        chains = self.output.chains
        chain = chains.get((tag_key, block_size))
        if chain is None:
            chain = chains[tag_key, block_size] = PrefixChain(tag_key, block_size, self.request)
        return chain


def finish_notice(
    live: LiveRequest,
    reason: FinishReason,
    stop_token_id: int | None,
    num_output: int,
    drafts: DraftCounts | None = None,
) -> FinishNotice:
    """`drafts` are those of its row, None while it is off one."""
    return FinishNotice(
        reason=reason,
        stop_token_id=stop_token_id,
        num_prompt_tokens=live.num_prompt_tokens,
        num_cached_tokens=live.num_prompt_cached_tokens or 0,
        num_output_tokens=num_output,
        times=live.phases.whole_times(),
        drafts=live.output.drafts if drafts is None else drafts,
    )


def retain_logprobs(live: LiveRequest, offset: int, tokens: tuple[TokenLogprobs, ...]) -> None:
    if live.request.is_resumable:
        live.output.retain_logprobs(offset, tokens)
