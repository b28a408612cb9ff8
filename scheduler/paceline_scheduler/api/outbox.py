"""Output on its way to one gRPC stream: gathered while the stream is busy or because its request says so, in bounds.

Putting something in never waits.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from paceline.plan.values import FinishReason, TokenLogprobs
from paceline_scheduler.api.text.parts.part import Part, append_parts
from paceline_scheduler.core.outputs import NO_DRAFTS, DraftCounts
from paceline_scheduler.core.phases import PhaseTimes

_DELTA_BYTES = 48
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 16
_PART_BYTES = 24
_FAILURE_BYTES = 512
# More is not held.
_MAX_HELD_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Finish:
    """At most one of the two `stop_` values is set; `times` is None where some are not known."""

    reason: FinishReason
    stop_text: str | None
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    times: PhaseTimes | None = None
    drafts: DraftCounts = NO_DRAFTS
    num_reasoning_tokens: int = 0


@dataclass(slots=True)
class PendingDelta:
    """`rolling_hash` is that of all tokens up to its last one."""

    request_id: str
    offset: int
    attempt: int
    rolling_hash: int
    token_ids: list[int]  # its own: later output is appended
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    index: int = 0  # of the completion
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first output
    parts: list[Part] | None = None  # its own, too
    token_bytes: tuple[bytes, ...] | None = None  # of each token of the vocabulary, to tell beside log-probabilities
    num_bytes: int = 0  # counted by the outbox

    def append(self, later: "PendingDelta") -> None:
        self.attempt, self.rolling_hash = later.attempt, later.rolling_hash
        self.token_ids += later.token_ids
        self.text += later.text
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        if later.parts:
            self.parts = self.parts or []
            append_parts(self.parts, later.parts)
        self.finish = later.finish
        self.num_bytes += later.num_bytes - _DELTA_BYTES


@dataclass(frozen=True, slots=True)
class FailedRequest:
    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """`grace_s` is how long it will still finish running work."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class MessageContent:
    deltas: tuple[PendingDelta, ...]
    failures: tuple[FailedRequest, ...]
    heartbeat: bool
    drain: DrainNotice | None

    @property
    def is_empty(self) -> bool:
        return not (self.deltas or self.failures or self.heartbeat or self.drain)


class _Held:
    """These completions want larger deltas; keyed by handle, oldest first."""

    def __init__(self) -> None:
        self.deltas: dict[int, PendingDelta] = {}
        self.num_bytes = 0

    def put(self, handle: int, delta: PendingDelta) -> None:
        self.deltas[handle] = delta
        self.num_bytes += delta.num_bytes

    def take(self, handle: int) -> PendingDelta | None:
        delta = self.deltas.pop(handle, None)
        if delta is not None:
            self.num_bytes -= delta.num_bytes
        return delta


@dataclass(slots=True)
class _Steps:
    num_bytes: int = 0  # in this one
    num_largest_bytes: int = 0  # since the client had read everything
    is_behind: bool = False  # the last step found something ready

    def end(self, num_ready_bytes: int) -> None:
        self.is_behind = num_ready_bytes > self.num_bytes
        self.num_largest_bytes = max(self.num_largest_bytes, self.num_bytes)
        self.num_bytes = 0


class Outbox:
    """`num_open` counts the completions whose end was not put in yet.

    Ready is what can be sent; held is output of a completion that wants larger deltas, until it is more than
    `max_bytes`. The message that was taken out last counts until its sender comes back.

    A client is slow if it leaves unread more than `max_bytes`, plus `max_bytes_per_request` for each open completion,
    plus the largest step since it had read everything.
    """

    def __init__(self, max_bytes: int, max_bytes_per_request: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_request = max_bytes_per_request
        self._deltas: dict[int, PendingDelta] = {}  # by handle, oldest first
        self._held = _Held()
        self._failures: deque[FailedRequest] = deque()
        self._num_bytes = 0  # ready
        self._num_leaving_bytes = 0  # in the message being sent
        self._steps = _Steps()
        self._heartbeat = False
        self._drain: DrainNotice | None = None
        self._filled = asyncio.Event()
        self._relieved = asyncio.Event()
        self.num_open = 0
        self.is_draining = False

    @property
    def num_bytes(self) -> int:
        """What gRPC has not taken yet, roughly."""
        return self._num_bytes + self._held.num_bytes + self._num_leaving_bytes

    def put(self, handle: int, delta: PendingDelta, at_least: int = 0) -> None:
        """`end_step` must follow. Small output with fewer than `at_least` tokens is held."""
        delta.num_bytes = _delta_bytes(delta)
        held = self._held.take(handle)
        if held is not None:
            held.append(delta)
            delta = held
        if len(delta.token_ids) >= at_least or delta.num_bytes > _MAX_HELD_BYTES:
            self._make_ready(handle, delta)
        else:
            self._held.put(handle, delta)

    def release(self, handle: int) -> None:
        held = self._held.take(handle)
        if held is not None:
            self._make_ready(handle, held)

    def _make_ready(self, handle: int, delta: PendingDelta) -> None:
        num_bytes = delta.num_bytes
        waiting = self._deltas.get(handle)
        if waiting is None:
            self._deltas[handle] = delta
        else:
            waiting.append(delta)
            num_bytes -= _DELTA_BYTES
        self._num_bytes += num_bytes
        self._steps.num_bytes += num_bytes

    def drop(self, handle: int) -> None:
        self._held.take(handle)
        if (delta := self._deltas.pop(handle, None)) is not None:
            self._num_bytes -= delta.num_bytes
        self._relieved.set()

    def num_bytes_of(self, handle: int) -> int:
        return sum(deltas[handle].num_bytes for deltas in (self._deltas, self._held.deltas) if handle in deltas)

    def fail(self, request_id: str, error: Exception) -> None:
        self._failures.append(FailedRequest(request_id, error))
        self._num_bytes += _failure_bytes(request_id)
        self.wake()

    def end_step(self) -> None:
        """Call it once per step."""
        if self._held.num_bytes > self._max_bytes:
            for handle in tuple(self._held.deltas):
                self.release(handle)
        self._steps.end(self._num_bytes)
        self.wake()

    @property
    def is_over(self) -> bool:
        return self._steps.is_behind and self._num_excess_bytes > self._steps.num_largest_bytes

    @property
    def _num_excess_bytes(self) -> int:
        room = self._max_bytes + self._max_bytes_per_request * self.num_open
        return self._num_bytes + self._num_leaving_bytes - room

    def wake(self) -> None:
        self._filled.set()

    def announce_drain(self, notice: DrainNotice) -> None:
        self._drain = notice
        self.is_draining = True
        self.wake()

    def beat(self) -> None:
        self._heartbeat = True
        self.wake()

    @property
    def is_empty(self) -> bool:
        return not self._deltas and not self._failures

    async def wait(self) -> None:
        """What was taken out before has been sent."""
        self._num_leaving_bytes = 0
        if self.is_empty:
            self._steps.num_largest_bytes = 0
        self._relieved.set()
        await self._filled.wait()

    async def wait_for_room(self) -> None:
        while self._num_excess_bytes > 0:
            self._relieved.clear()
            await self._relieved.wait()

    def collect(self, max_bytes: int) -> MessageContent:
        """Takes at most `max_bytes`, but at least one completion's ready output."""
        num_bytes = self._num_bytes
        if num_bytes <= max_bytes:
            deltas, failures = tuple(self._deltas.values()), tuple(self._failures)
            self._deltas.clear()
            self._failures.clear()
            self._num_bytes = 0
        else:
            deltas, failures = self._take(max_bytes)
        content = MessageContent(deltas, failures, self._heartbeat, self._drain)
        self._num_leaving_bytes = num_bytes - self._num_bytes
        self._heartbeat, self._drain = False, None
        if self.is_empty:
            self._filled.clear()
        return content

    def _take(self, max_bytes: int) -> tuple[tuple[PendingDelta, ...], tuple[FailedRequest, ...]]:
        deltas: list[PendingDelta] = []
        failures: list[FailedRequest] = []
        num_bytes = 0
        while self._deltas:
            handle, delta = next(iter(self._deltas.items()))
            if deltas and num_bytes + delta.num_bytes > max_bytes:
                break
            deltas.append(self._deltas.pop(handle))
            num_bytes += delta.num_bytes
        # An error must not overtake the output before it.
        while self._failures and not self._deltas and num_bytes <= max_bytes:
            failures.append(self._failures.popleft())
            num_bytes += _failure_bytes(failures[-1].request_id)
        self._num_bytes -= num_bytes
        return tuple(deltas), tuple(failures)


def _delta_bytes(delta: PendingDelta) -> int:
    text = delta.text
    num_bytes = _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + (len(text) if text.isascii() else 4 * len(text))
    if delta.logprobs or delta.prompt_logprobs:
        logprobs = (*delta.logprobs, *delta.prompt_logprobs)
        each = _LOGPROB_BYTES if delta.token_bytes is None else 2 * _LOGPROB_BYTES
        num_bytes += sum([each * (1 + len(item.top)) for item in logprobs])
    if delta.parts:
        num_bytes += sum([_PART_BYTES + len(part.name) + 4 * len(part.text) for part in delta.parts])
    return num_bytes


def _failure_bytes(request_id: str) -> int:
    # A refused id is returned too: its sender needs it.
    return _FAILURE_BYTES + 4 * len(request_id)
