"""A request between submission and its end: the core's own, changing view of it."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.outputs import OUTPUT_HASH_START, FinishNotice
from paceline_scheduler.core.plan import FinalRelease
from paceline_scheduler.core.prefix import PrefixChain
from paceline_scheduler.core.request import FinishReason, Int32Array, Request


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
    num_executor_deaths: int = 0
    num_prompt_cached_tokens: int | None = None
    chain: PrefixChain | None = None
    output_token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # while off a row
    output_hash: int = OUTPUT_HASH_START  # over output_token_ids
    address: str | None = None  # of the executor whose row it holds
    row: int | None = None
    final: FinalRelease | None = None  # how it ended
    record_address: str | None = None  # of the executor that was told how it ended
    is_acknowledged: bool = False  # nobody needs the record of its end

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def is_stranger(self) -> bool:
        """Whether it was found on an executor and nobody here ever asked for it."""
        return self.request.handle < 0

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output so far, while off a row: what a placement has to compute."""
        return self.num_prompt_tokens + len(self.output_token_ids)

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
        if self.chain is None or (self.chain.tag_key, self.chain.block_size) != (tag_key, block_size):
            self.chain = PrefixChain(tag_key, block_size, self.request)
        return self.chain


def finish_notice(live: LiveRequest, reason: FinishReason, stop_token_id: int | None, num_output: int) -> FinishNotice:
    """Return what the client is told at the end of a request with `num_output` output tokens."""
    return FinishNotice(
        reason=reason,
        stop_token_id=stop_token_id,
        num_prompt_tokens=live.num_prompt_tokens,
        num_cached_tokens=live.num_prompt_cached_tokens or 0,
        num_output_tokens=num_output,
    )
