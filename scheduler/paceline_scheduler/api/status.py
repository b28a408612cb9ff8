"""The scheduler's errors as gRPC statuses, of a call or of a request inside a session."""

import secrets
from collections.abc import Callable

import grpc

from paceline.process.statuses import ErrorStatus
from paceline_scheduler.errors import (
    ExecutorFailedError,
    GivenUpError,
    InvalidRequestError,
    RetryableRefusalError,
    SchedulerError,
    StaleAttachmentError,
    StandbyError,
    UnsupportedError,
)

MAX_TEXT_BYTES = 1024  # message and details together must fit into 8 KiB of headers
_MAX_NAME_BYTES = 256
INTERNAL_MESSAGE = "internal error; the scheduler's log says more"

Draw = Callable[[], float]
"""A number from 0 to 1."""
DRAW: Draw = secrets.SystemRandom().random


def cut(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= max_bytes else data[:max_bytes].decode(errors="ignore") + "…"


def describe(error: BaseException, draw: Draw = DRAW) -> ErrorStatus:
    """An unexpected error gets no details. The time to retry varies by a fifth: refused clients do not come back
    together.
    """
    if not isinstance(error, SchedulerError):
        return ErrorStatus(grpc.StatusCode.INTERNAL, "INTERNAL", INTERNAL_MESSAGE)
    code, reason, message = grpc.StatusCode[error.code.name], error.reason, cut(str(error))
    match error:
        case InvalidRequestError():
            path = cut(error.field, _MAX_NAME_BYTES)
            field_errors = ((path, cut(error.message)),)
            return ErrorStatus(code, reason, message, metadata={"field": path}, field_errors=field_errors)
        case UnsupportedError():
            return ErrorStatus(code, reason, message, metadata={"feature": cut(error.feature, _MAX_NAME_BYTES)})
        case ExecutorFailedError():
            return ErrorStatus(
                code, reason, message, metadata={"executor_reason": cut(error.executor_reason, _MAX_NAME_BYTES)}
            )
        case StaleAttachmentError():
            return ErrorStatus(code, reason, message, metadata={"newest_attachment": str(error.newest)})
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
