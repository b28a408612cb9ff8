"""Profiles over gRPC: which executors a scheduler has, and the parts of a trace.

Apart from the commands, because it knows `paceline.v1`. It refuses to know files and terminals.
"""

from collections.abc import AsyncGenerator
from typing import Any

from paceline.v1.admin_pb2 import ListExecutorsRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline.v1.executor_pb2 import ProfileRequest
from paceline.v1.executor_pb2_grpc import ExecutorServiceStub
from paceline_client.credentials import Credentials
from paceline_client.errors import UnavailableError
from paceline_client.wire import CallChannel, errors_of_calls, open_channel


async def executor_addresses(on: CallChannel, timeout_seconds: float) -> list[str]:
    """Where the scheduler with this admin port dials its executors."""
    stub: Any = AdminServiceStub(on.channel)
    listed = await stub.ListExecutors(ListExecutorsRequest(), metadata=on.metadata(), timeout=timeout_seconds)
    return [executor.address for executor in listed.executors]


async def trace_parts(address: str, num_steps: int, credentials: Credentials) -> AsyncGenerator[bytes, None]:
    """The parts of a trace of the next steps of an executor. Raises PacelineError."""
    on = open_channel(address, credentials, None)
    async with on.channel:
        stub: Any = ExecutorServiceStub(on.channel)
        try:
            with errors_of_calls():
                async for part in stub.Profile(ProfileRequest(num_steps=num_steps), metadata=on.metadata()):
                    yield part.trace
        except UnavailableError as error:
            if error.reason is not None:
                raise
            sentence = f"the executor at {address} does not answer: check the address, and that it runs"
            raise UnavailableError(sentence, reason="CONNECT_FAILED") from None
