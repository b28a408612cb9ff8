"""One request between its arrival and its end, as its client sees it."""

from dataclasses import dataclass
from enum import Enum

from paceline_scheduler.api.completion import CompletionText
from paceline_scheduler.api.outbox import Outbox
from paceline_scheduler.core.outputs import OUTPUT_HASH_START
from paceline_scheduler.core.request import RequestKey


class StreamState(Enum):
    """Where a stream stands. Only a running one is known to the backend; an ended one takes nothing more."""

    PREPARING = "preparing"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class RequestStream:
    """One request. `num_output_tokens` and `rolling_hash` are those of the output put into the outbox so far."""

    handle: int
    key: RequestKey
    outbox: Outbox
    state: StreamState = StreamState.PREPARING
    completion: CompletionText | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    rolling_hash: int = OUTPUT_HASH_START
