"""The fence: which scheduler may drive the executor.

Refuses to know gRPC, asyncio, clocks and rows: every call returns what has to happen, and its caller does it.

A scheduler holds the executor from its acceptance until another one is accepted. It can be replaced by a higher one
from the moment it is *free*: its stream has been ended for 50 ms, or it has been silent for the lease. Until then the
higher one is queued; only a takeover, an operator's act, displaces a live holder. The holder itself may attach again at
any time, with the same term or a higher one, and replaces its own stream.
"""

from dataclasses import dataclass, replace

from paceline.plan.values import MAX_TERM, MAX_TERM_RISE, Approach, Claim
from paceline_executor.errors import (
    AttachError,
    EpochEndedError,
    ServiceError,
    TermSupersededError,
    TooManySchedulersError,
)


@dataclass(frozen=True, slots=True)
class FenceTimes:
    """A holder may be silent for the lease; its ended stream is kept for it for `return_ns`."""

    lease_ns: int = 1_000_000_000
    return_ns: int = 50_000_000


@dataclass(frozen=True, slots=True)
class Accepted:
    """The displaced stream, if any, has ended."""

    stream_id: int
    epoch: int
    displaced_stream_id: int | None


@dataclass(frozen=True, slots=True)
class Waits:
    stream_id: int
    holder: Claim


@dataclass(frozen=True, slots=True)
class Refused:
    stream_id: int
    error: ServiceError


Verdict = Accepted | Waits | Refused


@dataclass(frozen=True, slots=True)
class _Stream:
    stream_id: int
    claim: Claim
    last_message_ns: int


class Fence:
    """`epoch` counts acceptances; claims accepted one after another never go down."""

    def __init__(self, times: FenceTimes, max_waiting: int = 16) -> None:
        self._times = times
        self._max_waiting = max_waiting
        self._last: Claim | None = None
        self._holder: _Stream | None = None
        self._ended_ns: int | None = None  # None while the holder's stream lasts
        self._line: dict[int, _Stream] = {}
        self._highest_term = 0
        self.epoch = 0

    @property
    def highest_term(self) -> int:
        """Of a claim that was accepted or waits."""
        return self._highest_term

    @property
    def holder(self) -> Claim | None:
        return self._holder.claim if self._holder else None

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def arrive(self, stream_id: int, claim: Claim, approach: Approach, now_ns: int) -> tuple[Verdict, ...]:
        """Takes a stream's hello."""
        if not 1 <= claim.term <= MAX_TERM:
            return (Refused(stream_id, AttachError(f"hello.term must be 1 to {MAX_TERM}")),)
        if claim.term > self._highest_term + MAX_TERM_RISE:
            sentence = f"hello.term is more than {MAX_TERM_RISE} above {self._highest_term}, the highest known here"
            return (Refused(stream_id, AttachError(sentence)),)
        stream = _Stream(stream_id, claim, now_ns)
        last = self._last
        if last is not None and self._is_superseded(claim, last):
            return (self._refusal(stream_id, last),)
        if last is None or self._goes_first(claim, last, approach):
            return self._accept(stream)
        self._line[stream_id] = stream
        verdicts = self._advance(now_ns)  # a queue full of silent ones keeps nobody from a free executor
        if not verdicts and len(self._line) > self._max_waiting:
            del self._line[stream_id]
            error = TooManySchedulersError(
                f"{self._max_waiting} schedulers wait for this executor already; try again later"
            )
            return (Refused(stream_id, error),)
        self._highest_term = max(self._highest_term, claim.term)
        return verdicts or (Waits(stream_id, last),)

    def note_message(self, stream_id: int, now_ns: int) -> tuple[Verdict, ...]:
        if self._holder is not None and self._holder.stream_id == stream_id:
            self._holder = replace(self._holder, last_message_ns=now_ns)
        elif stream_id in self._line:
            self._line[stream_id] = replace(self._line[stream_id], last_message_ns=now_ns)
        return self._advance(now_ns)

    def leave(self, stream_id: int, now_ns: int) -> tuple[Verdict, ...]:
        self._line.pop(stream_id, None)
        if self._holder is not None and self._holder.stream_id == stream_id:
            self._holder = None
            self._ended_ns = now_ns
        return self._advance(now_ns)

    def advance(self, now_ns: int) -> tuple[Verdict, ...]:
        return self._advance(now_ns)

    def renew(self, now_ns: int) -> None:
        """The executor itself stood still: silence meanwhile does not count."""
        if self._holder is not None:
            self._holder = replace(self._holder, last_message_ns=now_ns)
        self._line = {stream_id: replace(stream, last_message_ns=now_ns) for stream_id, stream in self._line.items()}

    def next_change_ns(self) -> int | None:
        """When time alone lets a waiting stream have the executor; None while nobody waits."""
        return self._free_at_ns() if self._line else None

    def _free_at_ns(self) -> int:
        if self._holder is not None:
            return self._holder.last_message_ns + self._times.lease_ns
        return 0 if self._ended_ns is None else self._ended_ns + self._times.return_ns

    def _advance(self, now_ns: int) -> tuple[Verdict, ...]:
        if not self._is_free(now_ns):
            return ()
        # Silent streams would only hold the executor up.
        alive = [stream for stream in self._line.values() if now_ns - stream.last_message_ns < self._times.lease_ns]
        if not alive:
            return ()
        return self._accept(max(alive, key=lambda stream: stream.claim))

    def _accept(self, stream: _Stream) -> tuple[Verdict, ...]:
        displaced = self._holder.stream_id if self._holder else None
        self._line.pop(stream.stream_id, None)
        self._last, self._holder, self._ended_ns = stream.claim, stream, None
        self._highest_term = max(self._highest_term, stream.claim.term)
        self.epoch += 1
        accepted = Accepted(stream.stream_id, self.epoch, displaced)
        return (accepted, *(self._look_again(waiting) for waiting in list(self._line.values())))

    def _look_again(self, waiting: _Stream) -> Verdict:
        """The holder has changed."""
        if self._last is not None and waiting.claim > self._last:
            return Waits(waiting.stream_id, self._last)
        del self._line[waiting.stream_id]
        last = self._last or waiting.claim
        if waiting.claim.scheduler_id == last.scheduler_id:
            error = EpochEndedError("this scheduler was accepted on another stream")
            return Refused(waiting.stream_id, error)
        return self._refusal(waiting.stream_id, last)

    def _is_superseded(self, claim: Claim, last: Claim) -> bool:
        """The claim comes too late, whether anybody drives now or not."""
        return claim < last

    def _goes_first(self, claim: Claim, last: Claim, approach: Approach) -> bool:
        """The last holder and an operator need not wait."""
        return claim.scheduler_id == last.scheduler_id or approach is Approach.TAKE_OVER

    def _is_free(self, now_ns: int) -> bool:
        """The last holder has lost its right to come first."""
        return now_ns >= self._free_at_ns()

    def _refusal(self, stream_id: int, holder: Claim) -> Refused:
        sentence = (
            f"scheduler {holder.scheduler_id!r} of term {holder.term} holds this executor;"
            f" attach again with a term above {self._highest_term}"
        )
        metadata = {
            "holder_scheduler_id": holder.scheduler_id,
            "holder_term": str(holder.term),
            "holder_address": holder.address,
            "highest_term": str(self._highest_term),
        }
        return Refused(stream_id, TermSupersededError(sentence, metadata))
