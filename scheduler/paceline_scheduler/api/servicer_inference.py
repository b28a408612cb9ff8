"""InferenceService over gRPC.

Keeps no state. The Guard makes statuses of the scheduler's errors.
"""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np
import structlog
from typing_extensions import override

from paceline.plan.values import RecordId
from paceline.process.callers import ANYBODY
from paceline.process.trace_ids import MAX_TRACE_PARENT_BYTES, MAX_TRACE_STATE_BYTES, trace_fields
from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceServicer
from paceline_scheduler.api import wire
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.servicer_access import any_tenant_of, audited, caller, tenant_of
from paceline_scheduler.api.servicer_session import serve_session
from paceline_scheduler.api.stream import StreamState
from paceline_scheduler.api.text.parts.formats import NO_PARTS
from paceline_scheduler.api.validation import check_prompt, choose_model
from paceline_scheduler.backend import ServedModel
from paceline_scheduler.errors import InvalidRequestError, SchedulerError

_Context = grpc.aio.ServicerContext[Any, Any]
_TRACE_FIELDS = {
    "traceparent": ("trace_parent", MAX_TRACE_PARENT_BYTES),
    "tracestate": ("trace_state", MAX_TRACE_STATE_BYTES),
}
_log = structlog.get_logger(__name__)


class InferenceServicer(InferenceServiceServicer):
    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    @override
    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> AsyncIterator[pb.GenerateResponse]:
        edge = self._edge
        if not request.request_id:
            request.request_id = secrets.token_hex(16)
        _take_trace(request, context)
        outbox = edge.open_outbox()
        try:
            stream = edge.open(request, outbox, caller())
            await edge.start(stream, context.time_remaining())
            while stream.state is not StreamState.ENDED or not outbox.is_empty:
                await outbox.wait()
                content = outbox.collect(edge.limits.max_message_bytes)
                for delta in content.deltas:
                    yield wire.generate_response(delta)
                for failure in content.failures:
                    raise failure.error
        finally:
            edge.close_outbox(outbox)

    @override
    def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: _Context
    ) -> AsyncIterator[pb.SessionResponse]:
        return serve_session(self._edge, request_iterator, caller())

    @override
    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelResponse:
        """Operators may cancel anybody's request."""
        by = caller()
        key = RecordId(any_tenant_of(request.tenant, by), request.request_id)
        if by is ANYBODY or key.tenant == by.tenant:
            await self._edge.cancel(key)
        else:
            trace = trace_fields(_trace_parent(self._edge, key))  # known while it is open
            await self._edge.cancel(key)
            about = {"request_id": key.request_id, "tenant": key.tenant, **trace}
            _log.info("foreign_request_cancelled", **about, **audited(by))
        return pb.CancelResponse()

    @override
    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        """A scheduler that drains or stands by raises instead."""
        self._edge.require_serving()
        return pb.ListModelsResponse(models=[await self._shown(served) for served in self._edge.executors.models()])

    @override
    async def GetModel(self, request: pb.GetModelRequest, context: _Context) -> pb.GetModelResponse:
        return pb.GetModelResponse(model=await self._shown(self._model(request.model)))

    @override
    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        model = self._model(request.model)
        if request.WhichOneof("prompt") is None:
            raise InvalidRequestError("prompt", "is missing: set one of text and chat")
        check_prompt(request, model, self._edge.limits)
        token_ids = await self._edge.texts.token_ids(request, model)
        texts = await self._edge.texts.token_texts(token_ids, model) if request.return_token_texts else ()
        return pb.TokenizeResponse(token_ids=token_ids.tolist(), token_texts=texts, max_model_len=model.max_model_len)

    @override
    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        model = self._model(request.model)
        columns = []
        for field, ids in (("token_ids", request.token_ids), ("preceding_token_ids", request.preceding_token_ids)):
            if len(ids) > model.max_model_len:
                raise InvalidRequestError(field, f"has {len(ids)} ids, at most {model.max_model_len} are taken")
            columns.append(np.fromiter(ids, dtype=np.int32, count=len(ids)))
        token_ids, before = columns
        skip_special_tokens = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        return pb.DetokenizeResponse(text=await self._edge.texts.decode(token_ids, model, skip_special_tokens, before))

    @override
    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        tenant = any_tenant_of(request.tenant, caller())
        return wire.explain_response(self._edge.explain(RecordId(tenant, request.request_id)))

    @override
    async def Estimate(self, request: pb.EstimateRequest, context: _Context) -> pb.EstimateResponse:
        request.request.tenant = tenant_of(request.request.tenant, caller())
        if not request.request.request_id:
            request.request.request_id = secrets.token_hex(16)
        return wire.estimate_response(await self._edge.estimate(request.request))

    async def _shown(self, model: ServedModel) -> pb.Model:
        try:
            support = await self._edge.texts.parts_support(model)
        except SchedulerError:  # too busy to try it now
            support = NO_PARTS
        return wire.model(model, support)

    def _model(self, name: str) -> ServedModel:
        self._edge.executors.require_lead()
        return choose_model(name, self._edge.executors.known_models())


def _trace_parent(edge: Edge, key: RecordId) -> str:
    """Of an open request, with a listener or without."""
    stream = edge.requests.by_key(key)
    if stream is not None:
        return stream.request.trace_parent
    live = edge.backend.views.open_request(key)
    return "" if live is None else live.request.trace_parent


def _take_trace(request: pb.GenerateRequest, context: _Context) -> None:
    """Take the trace from the call's metadata where the request names none. Of a session the requests' own count: it
    lives longer than any span.
    """
    if request.trace_parent:
        return
    for key, value in context.invocation_metadata() or ():
        name, at_most = _TRACE_FIELDS.get(key, ("", 0))
        if name and isinstance(value, str) and len(value) <= at_most:
            setattr(request, name, value)
