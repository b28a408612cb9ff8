"""What a scheduler tells operators, as values. Times are seconds; tokens, rows and blocks are counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from paceline_client.results import Explanation


class ExecutorState(Enum):
    """Where an executor stands, in a word that fits a column."""

    UNKNOWN = "?"
    CONNECTING = "dialling"
    SYNCING = "syncing"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Blocks:
    """KV blocks of an executor."""

    total: int = 0
    free: int = 0
    cached: int = 0
    used: int = 0


class Sums(NamedTuple):
    """What only grows while a scheduler lives: the difference of two is what happened in between."""

    num_steps: int = 0
    num_output_tokens: int = 0
    busy_s: float = 0.0
    predicted_s: float = 0.0
    planning_s: float = 0.0
    starved_s: float = 0.0
    num_drafts: int = 0
    num_accepted_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Executor:
    """One executor. `holder` is the other scheduler that drives it, and where clients reach that one."""

    address: str
    state: ExecutorState = ExecutorState.UNKNOWN
    model: str = ""
    num_rows: int = 0
    max_num_rows: int = 0
    blocks: Blocks = field(default_factory=Blocks)
    sums: Sums = field(default_factory=Sums)
    draft_speedup: float = 0.0
    last_error: str = ""
    holder: str = ""
    lost_for_s: float | None = None
    num_ranks: int = 1


@dataclass(frozen=True, slots=True)
class RequestKey:
    """What names a completion."""

    tenant: str
    request_id: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """A completion that waits or runs."""

    key: RequestKey
    explanation: Explanation
    model: str = ""
    num_prompt_tokens: int = 0
    max_tokens: int | None = None
    age_s: float = 0.0
    has_listener: bool = True


@dataclass(frozen=True, slots=True)
class Overview:
    """The answer to everything that is asked once in a while. `has_more`: there are more requests than these."""

    scheduler_id: str = ""
    executors: tuple[Executor, ...] = ()
    requests: tuple[ActiveRequest, ...] = ()
    has_more: bool = False
    num_waiting_requests: int = 0
    num_waiting_tokens: int = 0
    refusals: Mapping[str, int] = field(default_factory=dict)
    recoveries: Mapping[str, int] = field(default_factory=dict)

    @property
    def holder(self) -> str:
        """Who drives the executors, if all of them are another scheduler's; empty if they are not."""
        holders = [executor.holder for executor in self.executors]
        return holders[0] if holders and all(holders) else ""


@dataclass(frozen=True, slots=True)
class Step:
    """A finished step. `gaps_s` are times between tokens, each with how often it came."""

    first_tokens_s: tuple[float, ...] = ()
    gaps_s: tuple[tuple[float, int], ...] = ()
    num_dropped: int = 0
