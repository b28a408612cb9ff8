"""ExecutorService in front of a simulated executor."""

import asyncio
from collections.abc import AsyncIterator
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from paceline.v1 import executor_pb2, executor_pb2_grpc, plan_pb2
from paceline_scheduler.core.plan import StepResult
from paceline_scheduler.simulator import wire
from paceline_scheduler.simulator.bytes_tokenizer import BytesTokenizer
from paceline_scheduler.simulator.service import (
    Accepted,
    Draining,
    Ended,
    InLine,
    Outgoing,
    SimulatedService,
    Stream,
    StreamEnd,
)

_HEARTBEAT_S = 0.2
_MAX_PART_BYTES = 4096  # small, so that joining is exercised
_CODES = {
    StreamEnd.SUPERSEDED: (grpc.StatusCode.FAILED_PRECONDITION, code_pb2.FAILED_PRECONDITION, "TERM_SUPERSEDED"),
    StreamEnd.REPLACED: (grpc.StatusCode.ABORTED, code_pb2.ABORTED, "EPOCH_ENDED"),
    StreamEnd.VIOLATION: (grpc.StatusCode.INVALID_ARGUMENT, code_pb2.INVALID_ARGUMENT, "PLAN_VIOLATION"),
    StreamEnd.BROKEN: (grpc.StatusCode.UNAVAILABLE, code_pb2.UNAVAILABLE, "BROKEN"),
}

_Context = grpc.aio.ServicerContext[plan_pb2.AttachRequest, plan_pb2.AttachResponse]


class SimulatedExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Attach, GetInfo and GetTokenizer; the calls that only people use are UNIMPLEMENTED here."""

    def __init__(self, service: SimulatedService, tokenizer: BytesTokenizer) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self.num_tokenizer_calls = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Let a server answer for this executor."""
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(self, server)

    async def Attach(  # noqa: N802 - the name is the protocol's
        self, request_iterator: AsyncIterator[plan_pb2.AttachRequest], context: _Context
    ) -> AsyncIterator[plan_pb2.AttachResponse]:
        """Attach is the plan stream."""
        first = await anext(request_iterator)
        stream = self._service.hello(first.hello.scheduler_id, first.hello.term)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while True:
                try:
                    message = await asyncio.wait_for(stream.outbox.get(), _HEARTBEAT_S)
                except TimeoutError:
                    self._service.let_in()
                    yield wire.write_heartbeat()
                    continue
                if isinstance(message, Ended):
                    await _abort(context, message)
                for response in self._responses(message):
                    yield response
        finally:
            reader.cancel()
            self._service.leave(stream)

    async def GetInfo(  # noqa: N802 - the name is the protocol's
        self,
        request: executor_pb2.GetInfoRequest,  # noqa: ARG002 - it has no fields
        context: grpc.aio.ServicerContext[executor_pb2.GetInfoRequest, executor_pb2.GetInfoResponse],  # noqa: ARG002
    ) -> executor_pb2.GetInfoResponse:
        """GetInfo says who the executor is."""
        service, executor = self._service, self._service.executor
        return wire.write_info(
            executor.config,
            self._tokenizer,
            executor.incarnation,
            executor.epoch,
            service.highest_term,
            service.holder_scheduler_id,
        )

    async def GetTokenizer(  # noqa: N802 - the name is the protocol's
        self,
        request: executor_pb2.GetTokenizerRequest,  # noqa: ARG002 - it has no fields
        context: grpc.aio.ServicerContext[  # noqa: ARG002 - nothing to say about the call
            executor_pb2.GetTokenizerRequest, executor_pb2.GetTokenizerResponse
        ],
    ) -> AsyncIterator[executor_pb2.GetTokenizerResponse]:
        """GetTokenizer streams the tokenizer."""
        self.num_tokenizer_calls += 1
        for part in wire.write_tokenizer(self._tokenizer, _MAX_PART_BYTES):
            yield part

    async def GetState(  # noqa: N802 - the name is the protocol's
        self,
        request: executor_pb2.GetStateRequest,  # noqa: ARG002 - refused whatever it asks
        context: grpc.aio.ServicerContext[executor_pb2.GetStateRequest, executor_pb2.GetStateResponse],
    ) -> executor_pb2.GetStateResponse:
        """GetState is refused."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "GetState is not simulated")

    async def Profile(  # noqa: N802 - the name is the protocol's
        self,
        request: executor_pb2.ProfileRequest,  # noqa: ARG002 - refused whatever it asks
        context: grpc.aio.ServicerContext[executor_pb2.ProfileRequest, executor_pb2.ProfileResponse],
    ) -> executor_pb2.ProfileResponse:
        """Profile is refused."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Profile is not simulated")

    async def _read(self, requests: AsyncIterator[plan_pb2.AttachRequest], stream: Stream) -> None:
        async for request in requests:
            self._service.hear(stream, wire.read_plan(request.plan) if request.HasField("plan") else None)

    def _responses(self, message: Outgoing) -> list[plan_pb2.AttachResponse]:
        match message:
            case StepResult():
                return [wire.write_result(message)]
            case Accepted(description, snapshot):
                welcome = wire.write_welcome(description, self._service.executor.config, self._tokenizer)
                return [welcome, *wire.write_snapshot(snapshot)]
            case InLine(holder, term):
                return [wire.write_waiting(holder, term)]
            case Draining(reason):
                return [wire.write_drain(reason)]
            case Ended():
                return []


async def _abort(context: _Context, ended: Ended) -> NoReturn:
    """End the call with a status that says why."""
    code, number, reason = _CODES[ended.end]
    info = error_details_pb2.ErrorInfo(reason=reason, domain="paceline")
    info.metadata["holder_scheduler_id"] = ended.holder_scheduler_id
    info.metadata["holder_term"] = str(ended.holder_term)
    detail = any_pb2.Any()
    detail.Pack(info)
    sentence = f"{ended.end.value}: {ended.detail}"
    status = status_pb2.Status(code=number, message=sentence, details=[detail])
    await context.abort(code, sentence, (("grpc-status-details-bin", status.SerializeToString()),))
