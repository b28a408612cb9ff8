"""What can go wrong, as one tree, and the one place where a gRPC status becomes an error of it.

    PacelineError
    ├── InvalidRequestError        the request is wrong and stays wrong; `violations` name the fields
    │   └── UnsupportedError       it asks for something this server does not do
    ├── NotFoundError              no such model, or no such request
    ├── ConflictError              the request_id is in use, or a newer attachment took the request over
    ├── AccessDeniedError          who you are, or that you are unknown
    ├── OverloadedError            the queue is full; `retry_after` says when to try again
    ├── UnavailableError           nothing serves the request now
    │   ├── ConnectFailedError     no connection within `Timeout.connect_seconds`
    │   ├── WrongServerError       what answers there is another service
    │   └── ConnectionLostError    the connection broke while the request ran, and nobody went on with it in time
    ├── RequestTimeoutError        the request's time is up
    ├── RequestCancelledError      the request was cancelled before its end
    ├── ServerError                the server failed; its log says why
    ├── IncompleteOutputError      the output has not the form that was asked for: something cut it
    ├── StreamError                the output of one request cannot go on
    │   ├── StreamCorruptedError   tokens are missing, doubled or changed
    │   └── SlowConsumerError      more output was left unread, here or on the server, than may wait
    └── ClientClosedError          the client was closed, or made before a fork

Knows the google.rpc details that travel with a status. Refuses to know connections and retries.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field at fault, by its path in the request, such as `sampling.top_p`."""

    field: str
    description: str


class PacelineError(Exception):
    """The base of every error this library raises."""

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        retry_after: float | None = None,
        violations: tuple[FieldViolation, ...] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        """A constant for programs, such as `QUEUE_FULL`; None where the server gave none."""
        self.retry_after = retry_after
        """Seconds after which the server suggests to try again; None where it suggested nothing."""
        self.violations = violations
        """The fields at fault."""
        self.metadata: Mapping[str, str] = dict(metadata or {})
        """What the server added for programs: names and values."""

    def __str__(self) -> str:
        return self.message


class InvalidRequestError(PacelineError):
    """The request is wrong and stays wrong; `violations` name the fields."""


class UnsupportedError(InvalidRequestError):
    """The request asks for something this server does not do."""


class NotFoundError(PacelineError):
    """There is no such model, or no such request."""


class ConflictError(PacelineError):
    """The request_id is in use, or a newer attachment took the request over."""


class AccessDeniedError(PacelineError):
    """The caller is unknown, or may not do this."""


class OverloadedError(PacelineError):
    """The queue is full; `retry_after` says when to try again."""


class UnavailableError(PacelineError):
    """Nothing serves the request now."""


class ConnectFailedError(UnavailableError):
    """No connection could be made within `Timeout.connect_seconds`."""


class WrongServerError(UnavailableError):
    """What answers at the address is another service, or another port of a scheduler."""


class ConnectionLostError(UnavailableError):
    """The connection broke while the request ran, and nobody went on with it in time."""


class RequestTimeoutError(PacelineError):
    """The request's time is up."""


class RequestCancelledError(PacelineError):
    """The request was cancelled before its end: by its reader, or on its way."""


class ServerError(PacelineError):
    """The server failed; its log says why."""


class IncompleteOutputError(PacelineError):
    """The output has not the form that was asked for: `max_tokens` or a stop text cut it, or its class refuses it."""


class StreamError(PacelineError):
    """The output of one request cannot go on."""


class StreamCorruptedError(StreamError):
    """Tokens are missing, doubled or changed."""


class SlowConsumerError(StreamError):
    """More output was left unread than may wait: by the caller here, or by this client's connection on the server."""


class ClientClosedError(PacelineError):
    """The client was closed, or belongs to the process this one was forked from."""


class Detail(Protocol):
    """A google.protobuf.Any, or the product's own message of the same shape."""

    @property
    def type_url(self) -> str:
        """The type's name after a slash."""

    @property
    def value(self) -> bytes:
        """The message, serialised."""


_ERROR_OF_CODE: dict[int, type[PacelineError]] = {
    code_pb2.CANCELLED: RequestCancelledError,
    code_pb2.INVALID_ARGUMENT: InvalidRequestError,
    code_pb2.OUT_OF_RANGE: InvalidRequestError,
    code_pb2.FAILED_PRECONDITION: InvalidRequestError,
    code_pb2.UNIMPLEMENTED: UnsupportedError,
    code_pb2.DEADLINE_EXCEEDED: RequestTimeoutError,
    code_pb2.NOT_FOUND: NotFoundError,
    code_pb2.ALREADY_EXISTS: ConflictError,
    code_pb2.ABORTED: ConflictError,
    code_pb2.PERMISSION_DENIED: AccessDeniedError,
    code_pb2.UNAUTHENTICATED: AccessDeniedError,
    code_pb2.RESOURCE_EXHAUSTED: OverloadedError,
    code_pb2.UNAVAILABLE: UnavailableError,
}


# Where the code alone would say something else: that there is no room, say, while it is this client that is slow.
_ERROR_OF_REASON: dict[str, type[PacelineError]] = {
    "SLOW_CONSUMER": SlowConsumerError,
    # Only the stream has ended. Whether the client has another token by now the next call says.
    "TOKEN_REVOKED": ConnectionLostError,
}


def error_from_status(code: int, message: str, details: Iterable[Detail] = ()) -> PacelineError:
    """The error for a google.rpc.Code; codes without one of their own become `ServerError`."""
    found = _Found()
    for detail in details:
        try:
            found.add(detail)
        except DecodeError:
            # A detail that cannot be read must not hide the status it came with.
            continue
    kind = _ERROR_OF_REASON.get(found.reason or "") or _ERROR_OF_CODE.get(code, ServerError)
    return kind(
        message or f"the server answered with status {code} and no message",
        reason=found.reason,
        retry_after=found.retry_after,
        violations=tuple(found.violations),
        metadata=found.metadata,
    )


@dataclass(slots=True)
class _Found:
    """What the details of one status said."""

    reason: str | None = None
    retry_after: float | None = None
    violations: list[FieldViolation] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    def add(self, detail: Detail) -> None:
        match detail.type_url.rpartition("/")[2]:
            case "google.rpc.ErrorInfo":
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
                self.reason, self.metadata = info.reason or None, dict(info.metadata)
            case "google.rpc.RetryInfo":
                delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                self.retry_after = delay.seconds + delay.nanos / 1e9
            case "google.rpc.BadRequest":
                request = error_details_pb2.BadRequest.FromString(detail.value)
                self.violations += [FieldViolation(v.field, v.description) for v in request.field_violations]
