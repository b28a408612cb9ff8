"""One request between its arrival and its end, as its client sees it."""

import asyncio
from dataclasses import dataclass, field, replace
from enum import Enum

from paceline.plan.hashes import HASH_START
from paceline.plan.values import RecordId
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.completion import CompletionText
from paceline_scheduler.api.outbox import Outbox
from paceline_scheduler.api.request_spans import NO_SPAN, RequestSpan


class StreamState(Enum):
    """The backend knows only running ones; an ended one takes nothing more."""

    PREPARING = "preparing"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class RequestStream:
    """One attachment to a request, which is unchecked here.

    `handles` are by index; `running` have no end yet.
    """

    handles: tuple[int, ...]
    key: RecordId
    outbox: Outbox
    request: GenerateRequest
    state: StreamState = StreamState.PREPARING
    num_tokens_per_delta: int = 1
    num_prompt_tokens: int = 0
    span: RequestSpan = NO_SPAN
    running: "list[StreamedCompletion]" = field(default_factory=list)
    before: "RequestStream | None" = None
    """A refused comeback changes nothing: until then this one has the request."""
    waiting: asyncio.Timeout | None = None
    """While it is prepared: for an executor of its model."""

    def completion_keys(self) -> tuple[RecordId, ...]:
        return tuple(replace(self.key, index=index) for index in range(len(self.handles)))


@dataclass(slots=True, eq=False)
class StreamedCompletion:
    """`num_tokens` and `rolling_hash` are of its output so far."""

    stream: RequestStream
    handle: int
    key: RecordId
    text: CompletionText
    token_bytes: tuple[bytes, ...] | None = None  # of each token; None: nobody asked
    num_tokens: int = 0
    rolling_hash: int = HASH_START
