"""ExecutorService in front of a simulated executor."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from paceline.plan.codec import decode_request, encode_response
from paceline.plan.values import BatchPlan, Hello
from paceline.v1 import executor_pb2, executor_pb2_grpc, plan_pb2
from paceline_scheduler.simulator import wire, wire_views
from paceline_scheduler.simulator.bytes_tokenizer import BytesTokenizer
from paceline_scheduler.simulator.dialogue import greet, messages_of
from paceline_scheduler.simulator.service import Ended, Outgoing, SimulatedService, Stream, StreamEnd

_NUM_PARTS = 4  # of the tokenizer, so that joining is exercised
_CODES = {
    StreamEnd.SUPERSEDED: (grpc.StatusCode.FAILED_PRECONDITION, "TERM_SUPERSEDED"),
    StreamEnd.REPLACED: (grpc.StatusCode.ABORTED, "EPOCH_ENDED"),
    StreamEnd.TURNED_AWAY: (grpc.StatusCode.RESOURCE_EXHAUSTED, "LINE_FULL"),
    StreamEnd.WEDGED: (grpc.StatusCode.UNAVAILABLE, "STEP_WEDGED"),
    StreamEnd.PROTOCOL: (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_MISMATCH"),
    StreamEnd.VIOLATION: (grpc.StatusCode.INVALID_ARGUMENT, "PLAN_VIOLATION"),
    StreamEnd.BROKEN: (grpc.StatusCode.UNAVAILABLE, "BROKEN"),
}

_Context = grpc.aio.ServicerContext[plan_pb2.AttachRequest, plan_pb2.AttachResponse]


class SimulatedExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """All calls of an executor; Profile, which only people use, is UNIMPLEMENTED here."""

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
        stream = self._greet(first)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while True:
                message = await stream.outbox.get()
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
        return wire_views.write_info(self._service, self._tokenizer)

    async def GetTokenizer(  # noqa: N802 - the name is the protocol's
        self,
        request: executor_pb2.GetTokenizerRequest,  # noqa: ARG002 - it has no fields
        context: grpc.aio.ServicerContext[  # noqa: ARG002 - nothing to say about the call
            executor_pb2.GetTokenizerRequest, executor_pb2.GetTokenizerResponse
        ],
    ) -> AsyncIterator[executor_pb2.GetTokenizerResponse]:
        """GetTokenizer streams the tokenizer."""
        self.num_tokenizer_calls += 1
        for part in wire.write_tokenizer(self._tokenizer, -(-len(self._tokenizer.json) // _NUM_PARTS)):
            yield part

    async def GetState(  # noqa: N802 - the name is the protocol's
        self,
        request: executor_pb2.GetStateRequest,
        context: grpc.aio.ServicerContext[executor_pb2.GetStateRequest, executor_pb2.GetStateResponse],
    ) -> executor_pb2.GetStateResponse:
        """GetState shows rows and records."""
        if request.HasField("max_num_rows") and not 1 <= request.max_num_rows <= wire_views.MAX_VIEWS:
            sentence = f"max_num_rows is 1 to {wire_views.MAX_VIEWS}"
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", sentence)
        executor = self._service.executor
        return wire_views.write_state(executor.snapshot(), executor.blocks.num_owned, request)

    async def Profile(  # noqa: N802 - the name is the protocol's
        self,
        request: executor_pb2.ProfileRequest,  # noqa: ARG002 - refused whatever it asks
        context: grpc.aio.ServicerContext[executor_pb2.ProfileRequest, executor_pb2.ProfileResponse],
    ) -> AsyncIterator[executor_pb2.ProfileResponse]:
        """Profile is refused."""
        await _refuse(context, grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED", "Profile is not simulated")
        yield  # a stream, as it will be

    def _greet(self, first: plan_pb2.AttachRequest) -> Stream:
        (hello,) = decode_request(first.SerializeToString())
        assert isinstance(hello, Hello), "schedulers say hello first"
        return greet(self._service, hello)

    async def _read(self, requests: AsyncIterator[plan_pb2.AttachRequest], stream: Stream) -> None:
        async for request in requests:
            for message in decode_request(request.SerializeToString()):
                self._service.hear(stream, message if isinstance(message, BatchPlan) else None)

    def _responses(self, message: Outgoing) -> list[plan_pb2.AttachResponse]:
        said = messages_of(self._service, message)
        return [plan_pb2.AttachResponse.FromString(encode_response(each)) for each in said]


async def _abort(context: _Context, ended: Ended) -> NoReturn:
    """End the plan stream with a status that says why."""
    code, reason = _CODES[ended.end]
    holder = ended.holder
    metadata = {
        "holder_scheduler_id": holder.scheduler_id,
        "holder_term": str(holder.term),
        "holder_address": holder.address,
    }
    await _refuse(context, code, reason, f"{ended.end.value}: {ended.detail}", metadata)


async def _refuse(
    context: grpc.aio.ServicerContext[Any, Any],
    code: grpc.StatusCode,
    reason: str,
    sentence: str,
    metadata: Mapping[str, str] | None = None,
) -> NoReturn:
    """End a call with a status whose details say why, for programs."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="paceline", metadata=metadata))
    status = status_pb2.Status(code=code.value[0], message=sentence, details=[detail])
    await context.abort(code, sentence, (("grpc-status-details-bin", status.SerializeToString()),))
