"""The scheduler's errors as gRPC statuses, of a call or of a request inside a session."""

import secrets
from collections.abc import Callable

import grpc

from paceline.process.statuses import ErrorStatus
from paceline_scheduler.errors import (
    DeadlineExceededError,
    DeadlineUnreachableError,
    DivergenceError,
    DrainingError,
    DuplicateRequestError,
    ExecutorFailedError,
    ExecutorLeavingError,
    GivenUpError,
    InvalidRequestError,
    NoExecutorError,
    NoLongerServedError,
    NoRecordDirError,
    NoTokenLeftError,
    OutageError,
    PermissionDeniedError,
    QuarantinedError,
    QueueFullError,
    RequestFailedError,
    RequestRefusedError,
    ResumeMismatchError,
    RetryableRefusalError,
    SchedulerError,
    SlowConsumerError,
    StaleAttachmentError,
    StandbyError,
    StepFailedError,
    SupersededError,
    TenantLimitError,
    TokenRevokedError,
    TooManyWatchersError,
    UnauthenticatedError,
    UnknownExecutorError,
    UnknownModelError,
    UnknownRequestError,
    UnsupportedError,
)

MAX_TEXT_BYTES = 1024  # message and details together must fit into 8 KiB of headers
_MAX_NAME_BYTES = 256
INTERNAL_MESSAGE = "internal error; the scheduler's log says more"

Draw = Callable[[], float]
"""A number from 0 to 1."""
DRAW: Draw = secrets.SystemRandom().random

_CODES: dict[type[SchedulerError], tuple[grpc.StatusCode, str]] = {
    InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    UnsupportedError: (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED"),
    UnauthenticatedError: (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    TokenRevokedError: (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_REVOKED"),
    PermissionDeniedError: (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    DuplicateRequestError: (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST"),
    StaleAttachmentError: (grpc.StatusCode.ABORTED, "STALE_ATTACHMENT"),
    ResumeMismatchError: (grpc.StatusCode.FAILED_PRECONDITION, "RESUME_MISMATCH"),
    UnknownRequestError: (grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST"),
    UnknownModelError: (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    UnknownExecutorError: (grpc.StatusCode.NOT_FOUND, "UNKNOWN_EXECUTOR"),
    NoRecordDirError: (grpc.StatusCode.FAILED_PRECONDITION, "NO_RECORD_DIR"),
    TooManyWatchersError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS"),
    ExecutorLeavingError: (grpc.StatusCode.FAILED_PRECONDITION, "EXECUTOR_LEAVING"),
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    TenantLimitError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_LIMIT"),
    NoExecutorError: (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR"),
    StandbyError: (grpc.StatusCode.UNAVAILABLE, "STANDBY"),
    DrainingError: (grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    RequestRefusedError: (grpc.StatusCode.FAILED_PRECONDITION, "REFUSED"),
    DeadlineExceededError: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    DeadlineUnreachableError: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE"),
    SlowConsumerError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER"),
    SupersededError: (grpc.StatusCode.ABORTED, "STALE_ATTACHMENT"),
    QuarantinedError: (grpc.StatusCode.INTERNAL, "EXECUTORS_DIED"),
    NoLongerServedError: (grpc.StatusCode.FAILED_PRECONDITION, "NO_LONGER_SERVED"),
    OutageError: (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR"),
    GivenUpError: (grpc.StatusCode.UNAVAILABLE, "GIVEN_UP"),
    NoTokenLeftError: (grpc.StatusCode.FAILED_PRECONDITION, "NO_TOKEN_LEFT"),
    StepFailedError: (grpc.StatusCode.INTERNAL, "STEP_FAILED"),
    ExecutorFailedError: (grpc.StatusCode.INTERNAL, "EXECUTOR_FAILED"),
    RequestFailedError: (grpc.StatusCode.INTERNAL, "FAILED"),
    DivergenceError: (grpc.StatusCode.INTERNAL, "DIVERGENCE"),
    SchedulerError: (grpc.StatusCode.INTERNAL, "INTERNAL"),
}


def cut(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= max_bytes else data[:max_bytes].decode(errors="ignore") + "…"


def describe(error: BaseException, draw: Draw = DRAW) -> ErrorStatus:
    """An unexpected error gets no details. The time to retry varies by a fifth: refused clients do not come back
    together.
    """
    if not isinstance(error, SchedulerError):
        return ErrorStatus(grpc.StatusCode.INTERNAL, "INTERNAL", INTERNAL_MESSAGE)
    code, reason = next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    message = cut(str(error))
    match error:
        case InvalidRequestError():
            path = cut(error.field, _MAX_NAME_BYTES)
            field_errors = ((path, cut(error.message)),)
            return ErrorStatus(code, reason, message, metadata={"field": path}, field_errors=field_errors)
        case UnsupportedError():
            return ErrorStatus(code, reason, message, metadata={"feature": cut(error.feature, _MAX_NAME_BYTES)})
        case ExecutorFailedError():
            return ErrorStatus(code, reason, message, metadata={"executor_reason": cut(error.reason, _MAX_NAME_BYTES)})
        case RetryableRefusalError() | GivenUpError():
            retry_after_s = error.retry_after_s * (0.8 + 0.4 * draw())
            return ErrorStatus(code, reason, message, metadata=_active(error), retry_after_s=retry_after_s)
    return ErrorStatus(code, reason, message)


def _active(error: RetryableRefusalError | GivenUpError) -> dict[str, str]:
    active = error.active if isinstance(error, StandbyError | GivenUpError) else None
    if active is None:
        return {}
    address = {"active_address": cut(active.address, _MAX_NAME_BYTES)} if active.address else {}
    return address | {"active_term": str(active.term)}


def reason_of(error: SchedulerError) -> str:
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)[1]
