"""Errors as gRPC tells them: a code, a sentence, and google.rpc details for programs.

Knows what a status is made of. Refuses to know which error has which.
"""

from dataclasses import dataclass, field

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from paceline.plan.durations import write_duration

DOMAIN = "paceline"


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """`field_errors` pairs paths with sentences. Clients retry only after `retry_after_s`."""

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: dict[str, str] = field(default_factory=dict)
    field_errors: tuple[tuple[str, str], ...] = ()
    retry_after_s: float | None = None


def rpc_status(status: ErrorStatus) -> Status:
    details: list[Message] = [ErrorInfo(reason=status.reason, domain=DOMAIN, metadata=status.metadata)]
    if status.field_errors:
        violations = [BadRequest.FieldViolation(field=name, description=text) for name, text in status.field_errors]
        details.append(BadRequest(field_violations=violations))
    if status.retry_after_s is not None:
        details.append(RetryInfo(retry_delay=write_duration(status.retry_after_s)))
    packed = []
    for detail in details:
        packed.append(Any())
        packed[-1].Pack(detail)
    return Status(code=status.code.value[0], message=status.message, details=packed)


def trailing_metadata(status: ErrorStatus) -> tuple[tuple[str, str | bytes], ...]:
    """Retryable errors get gRPC's own pushback."""
    metadata: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", rpc_status(status).SerializeToString())]
    if status.retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(round(status.retry_after_s * 1000))))
    return tuple(metadata)
