"""Profiles over gRPC: which executors a scheduler has, and the parts of a trace.

Apart from the commands, because it knows `paceline.v1`. It refuses to know files and terminals.
"""

from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from paceline.v1.admin_pb2 import ListExecutorsRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline.v1.executor_pb2 import ProfileRequest
from paceline.v1.executor_pb2_grpc import ExecutorServiceStub
from paceline_client.credentials import Credentials
from paceline_client.errors import PacelineError, UnavailableError
from paceline_client.wire import error_from_call, open_channel

_LIST_SECONDS = 5.0


async def executor_addresses(admin: str, credentials: Credentials) -> list[str]:
    """Where the scheduler with this admin address dials its executors. Raises PacelineError."""
    on = open_channel(admin, credentials, None)
    async with on.channel:
        stub: Any = AdminServiceStub(on.channel)
        try:
            listed = await stub.ListExecutors(ListExecutorsRequest(), metadata=on.metadata(), timeout=_LIST_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _explained(error, f"the scheduler's admin port at {admin}") from None
    return [executor.address for executor in listed.executors]


async def trace_parts(address: str, num_steps: int, credentials: Credentials) -> AsyncGenerator[bytes, None]:
    """The parts of a trace of the next steps of an executor. Raises PacelineError."""
    on = open_channel(address, credentials, None)
    async with on.channel:
        stub: Any = ExecutorServiceStub(on.channel)
        try:
            async for part in stub.Profile(ProfileRequest(num_steps=num_steps), metadata=on.metadata()):
                yield part.trace
        except grpc.aio.AioRpcError as error:
            raise _explained(error, f"the executor at {address}") from None


def _explained(error: grpc.aio.AioRpcError, whom: str) -> PacelineError:
    known = error_from_call(error)
    if isinstance(known, UnavailableError) and known.reason is None:
        return UnavailableError(f"{whom} does not answer: check the address, and that it runs", reason="CONNECT_FAILED")
    return known
