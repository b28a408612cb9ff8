"""Whether and when a request is sent again, and as which attachment.

Knows what each failure says: that the request is refused, that whoever ran it is gone, or that there is no use. Refuses
to know streams; it is told the time, in seconds of a monotonic clock.
"""

from dataclasses import dataclass
from typing import NoReturn

from paceline_client.config import Retry
from paceline_client.errors import (
    ConnectFailedError,
    ConnectionLostError,
    OverloadedError,
    PacelineError,
    RequestTimeoutError,
    SlowConsumerError,
    UnavailableError,
)
from paceline_client.session import NOT_HERE, NOT_TAKEN

_NO_EXECUTOR = "NO_EXECUTOR"
# What a server says that takes nothing now, from anybody or for this model.
_TAKES_NOTHING = ("STANDBY", "DRAINING", _NO_EXECUTOR)
# The server ran the request, and says that it runs it no longer.
_GIVEN_UP = ("GIVEN_UP", "SLOW_CONSUMER")
_IN_USE = "DUPLICATE_REQUEST"
_NEWEST = "newest_attachment"  # said of a refused attachment, and not of one that was taken and then superseded
_MAX_TAKEOVERS = 3  # several clients may be taking it over at once


@dataclass(frozen=True, slots=True)
class FailureContext:
    now_s: float
    num_tokens: int
    was_answered: bool
    remaining_seconds: float | None
    """Of the request's time; None: no limit."""


@dataclass(slots=True)
class _Outage:
    """The time without a server for the request since its last output."""

    num_tokens: int
    began_s: float
    spent_seconds: float = 0.0  # before `began_s`, with times in between when a server had the request
    num_failures: int = 0


class Recovery:
    def __init__(self, retry: Retry, *, is_idempotent: bool = False) -> None:
        self._retry = retry
        self._num_takeovers_left = _MAX_TAKEOVERS if is_idempotent else 0
        self._num_refusals = 0
        self._number = 0
        self._may_be_known = False
        self._first_sent_s: float | None = None
        self._last_sent_s = 0.0
        self._outage: _Outage | None = None
        self._cause: PacelineError | None = None

    @property
    def may_be_known(self) -> bool:
        """A server may have it, also while no session of this client does."""
        return self._may_be_known

    @property
    def is_in_outage(self) -> bool:
        """It has lost its server, or was told to wait for one."""
        return self._outage is not None

    def next_attachment(self, now_s: float) -> tuple[int, float]:
        """Its number, and seconds since the request was first sent. Of several attachments the one with the highest
        number has the request; one that was only ever refused is still one that comes first.
        """
        if self._may_be_known or not self._number:
            self._number += 1
        return self._number, 0.0 if self._first_sent_s is None else now_s - self._first_sent_s

    def sent(self, now_s: float) -> None:
        self._first_sent_s = now_s if self._first_sent_s is None else self._first_sent_s
        self._last_sent_s = now_s

    def seconds_to_connect(self, now_s: float, connect_seconds: float, remaining_seconds: float | None) -> float:
        """`connect_seconds`; in an outage, as long as that may last."""
        if self._outage is not None:
            return self._seconds_left(self._outage, now_s, remaining_seconds)
        return connect_seconds if remaining_seconds is None else min(connect_seconds, remaining_seconds)

    def pause_after(self, error: PacelineError, at: FailureContext) -> float:
        """Raises the error that ends the request where sending it again is no use."""
        if isinstance(error, ConnectFailedError):
            self._raise_unreachable(error, at)
        self._may_be_known = self._may_be_known or may_be_known_after(error, at.num_tokens)
        if is_final(error):
            self._take_over_after(error, at)
            return 0.0
        if self._may_be_known or error.reason in _TAKES_NOTHING:
            return self._wait_out(error, at)
        self._num_refusals += 1
        pause = pause_before_retry(error, self._num_refusals, self._retry, at.remaining_seconds)
        if pause is None:
            raise error
        return pause

    def _take_over_after(self, error: PacelineError, at: FailureContext) -> None:
        """Number the next attachment above that of another client which has the request; else raise the error."""
        told = str(self._number) if error.reason == _IN_USE else error.metadata.get(_NEWEST, "")
        if not told.isdecimal() or at.num_tokens or not self._num_takeovers_left:
            raise error
        self._num_takeovers_left -= 1
        self._number = int(told) + 1

    def _wait_out(self, error: PacelineError, at: FailureContext) -> float:
        is_lost = _is_lost(error)
        outage = self._outage
        if outage is None or outage.num_tokens != at.num_tokens:
            outage = self._outage = _Outage(at.num_tokens, self._began_s(error, at))
        elif is_lost and at.was_answered:
            outage.spent_seconds += max(self._last_sent_s - outage.began_s, 0.0)
            outage.began_s = at.now_s
        outage.num_failures += 1
        self._cause = error
        pause = self._pause_in_outage(error, outage.num_failures, was_answered=at.was_answered)
        if pause >= self._seconds_left(outage, at.now_s, at.remaining_seconds):
            if at.remaining_seconds == 0:
                raise RequestTimeoutError(f"the request's time is up: {error}", reason="TIMEOUT") from error
            raise error
        return pause

    def _began_s(self, error: PacelineError, at: FailureContext) -> float:
        """A scheduler that says so may have waited for an executor since the request was first sent."""
        if error.reason == _NO_EXECUTOR and not at.num_tokens and self._first_sent_s is not None:
            return self._first_sent_s
        return at.now_s

    def _pause_in_outage(self, error: PacelineError, num_failures: int, *, was_answered: bool) -> float:
        if error.reason in NOT_HERE:
            # Not about the request: the connection looks for another server, and pauses when it has asked all.
            return 0.0
        if _is_lost(error):
            # Back at once the first time. Where the server said nothing at all the connection makes a pause of its own.
            num_failures = num_failures - 1 if was_answered else 0
        return max(error.retry_after or 0.0, self._retry.delay_seconds(num_failures) if num_failures else 0.0)

    def _seconds_left(self, outage: _Outage, now_s: float, remaining_seconds: float | None) -> float:
        if remaining_seconds is not None:
            return remaining_seconds
        return max(self._retry.max_outage_seconds - outage.spent_seconds - (now_s - outage.began_s), 0.0)

    def _raise_unreachable(self, error: ConnectFailedError, at: FailureContext) -> NoReturn:
        """No session came: say what was lost as well, if something was."""
        if self._outage is None or self._cause is None:
            raise error
        what = f"{self._cause}, and since then: {error}"
        if at.remaining_seconds is not None:
            raise RequestTimeoutError(f"the request's time is up: {what}", reason="TIMEOUT") from error
        if isinstance(self._cause, ConnectionLostError):
            raise ConnectionLostError(what, reason=self._cause.reason) from error
        raise self._cause from error


def is_final(error: PacelineError) -> bool:
    """An error that says 'not here' or 'not now' is not final."""
    # Exactly these: what is derived from them says more, and something else.
    return type(error) not in (OverloadedError, UnavailableError, ConnectionLostError, SlowConsumerError)


def may_be_known_after(error: PacelineError, num_tokens: int) -> bool:
    return num_tokens > 0 or _is_lost(error) or error.reason in _GIVEN_UP


def _is_lost(error: PacelineError) -> bool:
    return isinstance(error, ConnectionLostError) or error.reason == NOT_TAKEN


def pause_before_retry(
    error: PacelineError, num_attempts: int, retry: Retry, remaining_seconds: float | None
) -> float | None:
    """None when the error is final."""
    if type(error) not in (OverloadedError, UnavailableError) or num_attempts >= retry.max_attempts:
        return None
    asked = error.retry_after or 0.0
    if asked > retry.max_delay_seconds:
        return None
    pause = max(asked, retry.delay_seconds(num_attempts))
    return None if remaining_seconds is not None and pause >= remaining_seconds else pause
