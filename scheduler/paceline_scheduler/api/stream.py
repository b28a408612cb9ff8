"""One request between its arrival and its end, as its client sees it."""

from dataclasses import dataclass, field, replace
from enum import Enum

from paceline.plan.hashes import HASH_START
from paceline.plan.values import RecordId
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.completion import CompletionText
from paceline_scheduler.api.outbox import Outbox


class StreamState(Enum):
    """Where a stream stands. Only a running one is known to the backend; an ended one takes nothing more."""

    PREPARING = "preparing"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class RequestStream:
    """One attachment of a client to a request, which is here as it was sent: unchecked.

    `handles` are the edge's numbers for the completions, by index; `running` those that have no end.
    """

    handles: tuple[int, ...]
    key: RecordId
    outbox: Outbox
    request: GenerateRequest
    state: StreamState = StreamState.PREPARING
    num_tokens_per_delta: int = 1
    num_prompt_tokens: int = 0
    running: "list[Completion]" = field(default_factory=list)
    before: "RequestStream | None" = None
    """The stream that has the request until this one does: a comeback that is refused changes nothing."""

    def completion_keys(self) -> tuple[RecordId, ...]:
        return tuple(replace(self.key, index=index) for index in range(len(self.handles)))


@dataclass(slots=True, eq=False)
class Completion:
    """One completion of a running request. `num_tokens` and `rolling_hash` are those of its output so far."""

    stream: RequestStream
    handle: int
    key: RecordId
    text: CompletionText
    num_tokens: int = 0
    rolling_hash: int = HASH_START
