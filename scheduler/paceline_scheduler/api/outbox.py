"""Output on its way to one gRPC stream: gathered while the stream is busy, bounded in bytes.

Knows deltas and ends of requests, not how they were made nor how they are sent. Putting something in never waits;
everything happens on the event loop.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from paceline_scheduler.core.plan import TokenLogprobs
from paceline_scheduler.core.request import FinishReason

# What a message costs beside its tokens and text: ids, offsets, hashes, the sentence of an error.
_DELTA_BYTES = 48
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 16
_FAILURE_BYTES = 512


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a completion as its client is told. At most one of the two `stop_` values is set."""

    reason: FinishReason
    stop_text: str | None
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class PendingDelta:
    """Output of one request since its last message. `rolling_hash` is that of all tokens up to its last one."""

    request_id: str
    offset: int
    attempt: int
    rolling_hash: int
    token_ids: list[int]  # its own: later output is appended
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # of these tokens, or of none
    finish: Finish | None = None
    num_bytes: int = 0  # counted by the outbox

    def append(self, later: "PendingDelta") -> None:
        """Append what came after it."""
        self.attempt, self.rolling_hash = later.attempt, later.rolling_hash
        self.token_ids += later.token_ids
        self.text += later.text
        self.logprobs += later.logprobs
        self.finish = later.finish
        self.num_bytes += later.num_bytes


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that ended with an error."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """The scheduler is going away: a sentence, and how long it will still finish running work."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Parcel:
    """What goes into the next message."""

    deltas: tuple[PendingDelta, ...]
    failures: tuple[FailedRequest, ...]
    heartbeat: bool
    drain: DrainNotice | None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.deltas or self.failures or self.heartbeat or self.drain)


class Outbox:
    """What waits for one gRPC stream. `num_open` counts the requests whose end was not put in yet."""

    def __init__(self, max_bytes: int, max_bytes_per_request: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_request = max_bytes_per_request
        self._deltas: dict[int, PendingDelta] = {}  # by the edge's number for the request, oldest first
        self._failures: deque[FailedRequest] = deque()
        self._num_bytes = 0
        self._heartbeat = False
        self._drain: DrainNotice | None = None
        self._filled = asyncio.Event()
        self._relieved = asyncio.Event()
        self._relieved.set()
        self.num_open = 0
        self.is_draining = False

    # For the edge

    def put(self, handle: int, delta: PendingDelta) -> bool:
        """Put in output of a request, behind what waits of it; `wake` must follow.

        Returns False when that is more than may wait. What one step brings is taken whatever its size: only a client
        that left something of this request unread is slow.
        """
        text = delta.text
        num_bytes = _TOKEN_BYTES * len(delta.token_ids) + (len(text) if text.isascii() else 4 * len(text))
        if delta.logprobs:
            num_bytes += sum([_LOGPROB_BYTES * (1 + len(item.top)) for item in delta.logprobs])
        waiting = self._deltas.get(handle)
        if waiting is None:
            delta.num_bytes = num_bytes + _DELTA_BYTES
            self._deltas[handle] = delta
            self._num_bytes += delta.num_bytes
            return True
        delta.num_bytes = num_bytes
        waiting.append(delta)
        self._num_bytes += num_bytes
        return self._num_bytes <= self._max_bytes + self._max_bytes_per_request * self.num_open

    def drop(self, handle: int) -> None:
        """Take out what waits of a request: nobody wants it any more."""
        delta = self._deltas.pop(handle, None)
        if delta is not None:
            self._num_bytes -= delta.num_bytes

    def fail(self, request_id: str, error: Exception) -> None:
        """Put in the end of a request by an error; it follows the request's deltas."""
        self._failures.append(FailedRequest(request_id, error))
        self._num_bytes += _failure_bytes(request_id)
        if self._num_bytes > self._max_bytes:
            self._relieved.clear()
        self.wake()

    def wake(self) -> None:
        """Let the stream send what was put in; called once per step however many requests it moved."""
        self._filled.set()

    def announce_drain(self, notice: DrainNotice) -> None:
        """Tell the client once that the scheduler is going away."""
        self._drain = notice
        self.is_draining = True
        self.wake()

    # For the gRPC stream

    def beat(self) -> None:
        """Put in a heartbeat, if none waits already."""
        self._heartbeat = True
        self.wake()

    @property
    def is_empty(self) -> bool:
        """Whether all output was taken out."""
        return not self._deltas and not self._failures

    async def wait(self) -> None:
        """Wait until there may be something to send."""
        await self._filled.wait()

    async def wait_for_room(self) -> None:
        """Wait while a client that sends what must be refused does not read the refusals."""
        await self._relieved.wait()

    def collect(self, max_bytes: int) -> Parcel:
        """Take out about `max_bytes` at most, but at least one request's output if there is any."""
        parcel = self._everything() if self._num_bytes <= max_bytes else self._part(max_bytes)
        self._heartbeat, self._drain = False, None
        if self._num_bytes <= self._max_bytes:
            self._relieved.set()
        if self.is_empty:
            self._filled.clear()
        return parcel

    def _everything(self) -> Parcel:
        parcel = Parcel(tuple(self._deltas.values()), tuple(self._failures), self._heartbeat, self._drain)
        self._deltas.clear()
        self._failures.clear()
        self._num_bytes = 0
        return parcel

    def _part(self, max_bytes: int) -> Parcel:
        deltas, failures, num_bytes = [], [], 0
        while self._deltas and num_bytes <= max_bytes:
            handle = next(iter(self._deltas))
            delta = self._deltas.pop(handle)
            deltas.append(delta)
            num_bytes += delta.num_bytes
        # An error must not overtake the output that came before it.
        while self._failures and not self._deltas and num_bytes <= max_bytes:
            failures.append(self._failures.popleft())
            num_bytes += _failure_bytes(failures[-1].request_id)
        self._num_bytes -= num_bytes
        return Parcel(tuple(deltas), tuple(failures), self._heartbeat, self._drain)


def _failure_bytes(request_id: str) -> int:
    # An id that is refused for its length is returned too, or its sender would not know it.
    return _FAILURE_BYTES + 4 * len(request_id)
