"""How a call was refused. Apart from `edge_server`: processes are asked, too."""

from collections.abc import Awaitable, Iterable
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

Details = dict[Any, Any]
"""By kind."""


class Refusal(NamedTuple):
    code: grpc.StatusCode
    sentence: str
    details: Details


async def refusal_of(call: Awaitable[object]) -> Refusal:
    """Raises AssertionError where it is none."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return Refusal(error.code(), error.details() or "", details_of(error.trailing_metadata() or ()))
    raise AssertionError("the call was not refused")


def details_of(trailing_metadata: Iterable[tuple[str, str | bytes]]) -> Details:
    """None of gRPC's own."""
    packed = dict(trailing_metadata).get("grpc-status-details-bin", b"")
    assert isinstance(packed, bytes)
    kinds = (ErrorInfo, BadRequest, RetryInfo)
    found = Status.FromString(packed).details
    return {kind: kind.FromString(each.value) for each in found for kind in kinds if each.Is(kind.DESCRIPTOR)}
