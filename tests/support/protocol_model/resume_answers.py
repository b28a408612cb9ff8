"""What schedulers do with clients in the resume model: answer them, cancel for them, and give up those that are gone.

Follows `scheduler/paceline_scheduler/core`: `recovery`, `requests/resuming`.
"""

from collections.abc import Iterator

from protocol_model.checker import Move
from protocol_model.resume_client import Talk, with_stream
from protocol_model.resume_scheduler import called_away, ended, is_synced, superseded, tell
from protocol_model.resume_state import (
    LENGTH,
    Client,
    Delta,
    Ending,
    Faults,
    Live,
    Opening,
    Output,
    Phase,
    Safeguard,
    Scheduler,
    Stream,
    Word,
)


class AnswerMoves:
    """The moves of one scheduler towards clients, given which safeguards are on and whether these send their tokens."""

    def __init__(self, slot: int, safeguards: frozenset[Safeguard], *, has_prior: bool) -> None:
        self._name = f"scheduler {'AB'[slot]}"
        self._safeguards = safeguards
        self._has_prior = has_prior

    def answer(self, talk: Talk, scheduler: Scheduler) -> Iterator[Move]:
        """Answer clients that come, and see clients that go."""
        for stream in talk:
            if stream.opening is not None and stream.ending is Ending.NONE and is_synced(scheduler, self._safeguards):
                after, told = self._opened(talk, scheduler, stream, stream.opening)
                yield f"{self._name} answers attachment {stream.attachment}", (told, after)
            if (not stream.is_open or stream.is_cut) and stream.ending is Ending.NONE:
                ended = with_stream(talk, stream, stream._replace(opening=None, ending=Ending.UNAVAILABLE))
                after = self._detached(scheduler, stream)
                yield f"{self._name} sees the end of attachment {stream.attachment}", (ended, after)

    def cancel(self, client: Client, talk: Talk, scheduler: Scheduler) -> Iterator[Move]:
        """Cancel by key."""
        if (
            client.phase is Phase.CANCELLING
            and Word.ATTACHED in scheduler.words
            and is_synced(scheduler, self._safeguards)
        ):
            over = client._replace(phase=Phase.CANCELLED)
            told = tell(talk, scheduler.live, (), Ending.CANCELLED)
            yield f"{self._name} cancels the request", (over, told, ended(scheduler, is_cancelled=True))

    def abandon(self, scheduler: Scheduler) -> Iterator[Move]:
        """The client has not come back in time."""
        live = scheduler.live
        if live is not None and not live.is_over and not live.is_heard:
            yield f"{self._name} ends the request, whose client is gone", (ended(scheduler, is_cancelled=True),)

    def abandon_early(self, scheduler: Scheduler, faults: Faults) -> Iterator[Move]:
        """The client is on its way, but comes too late."""
        if faults.windows:
            left = faults._replace(windows=faults.windows - 1, is_excused=True)
            for label, (after,) in self.abandon(scheduler):
                yield f"{label} for long", (after, left)

    # Inside

    def _opened(self, talk: Talk, scheduler: Scheduler, stream: Stream, opening: Opening) -> tuple[Scheduler, Talk]:
        read = stream._replace(opening=None)
        live = scheduler.live
        if live is None or (live.is_over and live.is_cancelled):
            return self._begun(talk, scheduler, stream, opening)
        is_lower = opening.attachment < live.attachment and Safeguard.ATTACHMENT in self._safeguards
        if not live.is_over and is_lower:
            return scheduler, with_stream(talk, stream, read._replace(ending=Ending.ABORTED))
        if not self._holds_beginning(live.output, opening.held):
            if live.is_over:
                return self._begun(talk, scheduler, stream, opening)
            return self._restarted(talk, scheduler, stream, opening)
        attempt = max(live.attempt, opening.last_attempt)
        joined = live._replace(attempt=attempt, attachment=opening.attachment, is_heard=True)
        told = superseded(with_stream(talk, stream, read), live)
        offset = len(opening.held) if Safeguard.OFFSET in self._safeguards else 0
        deltas = tuple(
            Delta(live.output[:place], live.output[place], joined.attempt) for place in range(offset, len(live.output))
        )
        told = tell(told, joined, deltas, Ending.DONE if live.is_over else Ending.NONE)
        return scheduler._replace(live=joined._replace(is_heard=not live.is_over)), told

    def _holds_beginning(self, output: Output, held: Output) -> bool:
        if Safeguard.HASH not in self._safeguards:
            return len(held) <= len(output)
        return output[: len(held)] == held

    def _begun(self, talk: Talk, scheduler: Scheduler, stream: Stream, opening: Opening) -> tuple[Scheduler, Talk]:
        read = stream._replace(opening=None)
        if opening.held and not self._has_prior:
            return scheduler, with_stream(talk, stream, read._replace(ending=Ending.REFUSED))
        if len(opening.held) == LENGTH:
            return scheduler, with_stream(talk, stream, read._replace(ending=Ending.DONE))
        attempt = max(opening.last_attempt, 0 if scheduler.live is None else scheduler.live.attempt)
        live = Live(opening.held, attempt, opening.attachment, is_heard=True)
        return scheduler._replace(live=live), with_stream(talk, stream, read)

    def _restarted(self, talk: Talk, scheduler: Scheduler, stream: Stream, opening: Opening) -> tuple[Scheduler, Talk]:
        live = scheduler.live
        assert live is not None, "it is known"
        if not self._has_prior:
            return scheduler, with_stream(talk, stream, stream._replace(opening=None, ending=Ending.REFUSED))
        told = superseded(with_stream(talk, stream, stream._replace(opening=None)), live)
        attempt = max(live.attempt, opening.last_attempt)
        restarted = Live(opening.held, attempt, opening.attachment, is_heard=True)
        return called_away(scheduler)._replace(live=restarted), told

    def _detached(self, scheduler: Scheduler, stream: Stream) -> Scheduler:
        live = scheduler.live
        if live is None:
            return scheduler
        is_listener = live.attachment == stream.attachment or Safeguard.STALE_END not in self._safeguards
        return scheduler._replace(live=live._replace(is_heard=live.is_heard and not is_listener))
