"""A request between submission and its end: the core's own, changing view of it."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import FinalRelease, FinishReason, Int32Array, TokenLogprobs
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.logprobs import KeptLogprobs
from paceline_scheduler.core.outputs import FinishNotice
from paceline_scheduler.core.prefix import PrefixChain
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.suspects import Suspicion

PATIENCE_S = 30.0
"""What a request without a deadline is given before it is as urgent as one whose deadline has come, and by how much a
step of priority comes before or after."""

RESUME_WINDOW_S = 30.0
"""How long a resumable request goes on without anybody who listens."""

MAX_WAITED_S = 60.0
"""What a client may say at most that its request has waited elsewhere: it sets the place in the line."""

MAX_PROMPT_LOGPROBS_CHUNK = 64
"""The step-time model knows nothing of such rows: so few keep a step near its prediction, whatever the vocabulary."""


class Status(Enum):
    """Where a request stands. A preempted one is leaving its row until the executor confirms it, then waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class LiveRequest:
    """What changes about a request rarely; what changes every step is in the columns of its row."""

    request: Request
    arrival_number: int
    submitted_s: float
    max_tokens: int = 0  # of the placement
    status: Status = Status.WAITING
    attempt: int = 0
    num_preemptions: int = 0
    num_preempting: int = 0  # 1 while a preemption is planned and not confirmed
    preemption_reason: str = ""  # of the last preemption, for people
    left_since_s: float | None = None  # when an executor first left it to a better one
    suspicion: Suspicion = field(default_factory=Suspicion)
    num_prompt_cached_tokens: int | None = None
    chains: dict[tuple[bytes, int], PrefixChain] = field(default_factory=dict)  # by tag key and block size
    output_token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # while off a row
    output_hash: int = HASH_START  # over output_token_ids
    address: str | None = None  # of the executor whose row it holds
    row: int | None = None
    final: FinalRelease | None = None  # how it ended
    record_address: str | None = None  # of the executor that was told how it ended
    is_acknowledged: bool = False  # nobody needs the record of its end
    detached_until_s: float | None = None  # nobody listens, and how long it goes on so
    logprobs: KeptLogprobs | None = None  # of its output, if asked for: one who comes back may not have them all
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # the same for the prompt, once they were told
    is_stranger: bool = False  # found on a row where nobody asks for it: it only has to leave

    place: tuple[float, int] = field(init=False)
    """Where it stands among all requests of its model, smallest first; it never changes.

    Earliest deadline first within a priority, where no deadline counts as one `PATIENCE_S` away. Because time of
    submission is part of it, everything that waits is overtaken only by what is submitted soon after it: nothing
    starves, whatever its priority.
    """

    def __post_init__(self) -> None:
        due_s = self.submitted_s + PATIENCE_S
        if self.request.deadline_s is not None:
            due_s = min(due_s, self.request.deadline_s)
        self.place = due_s + self.request.priority * PATIENCE_S, self.arrival_number

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.request.prompt_token_ids)

    def leave_to_others(self, now: float) -> None:
        """An executor that could take it left it to a better one."""
        if self.left_since_s is None:
            self.left_since_s = now

    @property
    def is_suspect(self) -> bool:
        """Whether it runs in steps of its own, while off a row."""
        return self.suspicion.is_suspect(len(self.output_token_ids))

    @property
    def was_heard(self) -> bool:
        """Whether anybody has ever listened to it here: else it was only found on an executor."""
        return self.request.handle >= 0

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output so far, while off a row: what a placement has to compute."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_own_tokens(self) -> int:
        """How many of its known tokens it has to compute if nothing is cached, while off a row.

        Completions but the first find the prompt computed, all but its last token.
        """
        is_sharing = self.request.key.index > 0 and not self.computes_all
        return len(self.output_token_ids) + (1 if is_sharing else self.num_prompt_tokens)

    @property
    def largest_chunk(self) -> int:
        """How many tokens of its prompt one step may compute: each with log-probabilities costs a row of logits."""
        return MAX_PROMPT_LOGPROBS_CHUNK if self.request.num_prompt_logprobs is not None else self.num_known_tokens

    def go_on_from(self, output_token_ids: Int32Array) -> None:
        """Take this for its output, while off a row: what it had, and the keys of blocks with that, are void."""
        self.output_token_ids = output_token_ids
        self.output_hash = rolling_hash(HASH_START, output_token_ids)
        self.chains.clear()

    def least_rest_on(self, description: ExecutorDescription) -> int:
        """Return how many more output tokens it gets there at least before it can end, while off a row."""
        least = min(self.request.min_tokens, self.max_tokens_on(description))
        return max(1, least - len(self.output_token_ids))

    @property
    def computes_all(self) -> bool:
        """Whether it may not start behind what others computed: log-probabilities of its prompt are still owed."""
        owes_logprobs = self.request.num_prompt_logprobs is not None and not len(self.output_token_ids)
        return self.request.bypass_prefix_cache or owes_logprobs

    @property
    def num_placed_bytes(self) -> int:
        """What placing it adds to a plan, roughly."""
        return 4 * self.num_known_tokens + len(self.request.origin)

    def fits(self, description: ExecutorDescription) -> bool:
        """Tell whether an executor with nothing else to do could run it to its end."""
        wanted = self.request.max_tokens
        needed = self.num_known_tokens + 1 if wanted is None else self.num_prompt_tokens + wanted
        return description.model == self.request.model and needed <= description.max_request_tokens

    def max_tokens_on(self, description: ExecutorDescription) -> int:
        """Return how many output tokens it may have there: what was asked for, else all that fit."""
        return self.request.max_tokens or description.max_request_tokens - self.num_prompt_tokens

    def known_token_ids(self) -> Int32Array:
        """Return prompt and output so far, while off a row."""
        return np.concatenate((self.request.prompt_token_ids, self.output_token_ids))

    def prefix_chain(self, tag_key: bytes, block_size: int) -> PrefixChain:
        """Return the chain of block keys under an executor's tag key."""
        chain = self.chains.get((tag_key, block_size))
        if chain is None:
            chain = self.chains[tag_key, block_size] = PrefixChain(tag_key, block_size, self.request)
        return chain


def finish_notice(live: LiveRequest, reason: FinishReason, stop_token_id: int | None, num_output: int) -> FinishNotice:
    """Return what the client is told at the end of a request with `num_output` output tokens."""
    return FinishNotice(
        reason=reason,
        stop_token_id=stop_token_id,
        num_prompt_tokens=live.num_prompt_tokens,
        num_cached_tokens=live.num_prompt_cached_tokens or 0,
        num_output_tokens=num_output,
    )


def keep_logprobs(live: LiveRequest, offset: int, tokens: tuple[TokenLogprobs, ...]) -> None:
    """Remember what was told of an output's log-probabilities, for a client that comes back."""
    if not live.request.is_resumable:
        return
    if live.logprobs is None or live.logprobs.end != offset:
        live.logprobs = KeptLogprobs(offset)
    live.logprobs.tokens.extend(tokens)
