"""Plays scripts on the InferenceService. Knows the protocol as a server speaks it; has no model and no schedule."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.rpc import status_pb2

from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceServicer
from paceline_client.testing.messages import error_details, pack, request_error
from paceline_client.testing.played import PlayedRequest, RefusedError, stale
from paceline_client.testing.script import Break, Fail, Script, Step
from paceline_client.testing.session import FakeSession

Context = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]


class BrokenOffError(Exception):
    def __init__(self, step: Break) -> None:
        super().__init__(step.message)
        self.step = step


@dataclass(slots=True)
class Seen:
    """In the order of arrival."""

    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    num_sessions: int = 0
    num_heartbeats: int = 0


class FakeServicer(InferenceServiceServicer):
    """One model, one script, any number of sessions."""

    def __init__(
        self,
        script: Script,
        *,
        models: Sequence[pb.Model] = (),
        heartbeat_seconds: float | None = 0.1,
        break_after: Sequence[int] = (),
    ) -> None:
        self.script = script
        self.models = list(models)
        self.seen = Seen()
        self.released = asyncio.Event()
        self.resume_refusals: list[Fail] = []
        self.session_refusal: Break | None = None
        self.refusal: Fail | None = None
        self.waiting_for = ""
        self._heartbeat_seconds = heartbeat_seconds
        self._break_after = list(break_after)
        self._sessions: list[FakeSession] = []
        self._requests: dict[tuple[str, str], PlayedRequest] = {}  # by tenant and id, until their end is acknowledged
        self._spent: dict[tuple[str, str], set[int]] = {}

    async def Session(  # noqa: N802  gRPC's spelling
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """Play the script for every request of the session; several deltas that wait go out in one message."""
        try:
            async for response in self.serve(request_iterator):
                yield response
        except BrokenOffError as error:
            await context.abort(error.step.code, error.step.message)

    async def serve(self, messages: AsyncIterator[pb.SessionRequest]) -> AsyncGenerator[pb.SessionResponse, None]:
        """A session without gRPC around it. `BrokenOffError` where it ends with a status."""
        self.seen.num_sessions += 1
        if self.session_refusal is not None:
            raise BrokenOffError(self.session_refusal)
        session = FakeSession(self, messages, self._break_after.pop(0) if self._break_after else None)
        self._sessions.append(session)
        try:
            while (response := await session.next_response(self._heartbeat_seconds)) is not None:
                yield response
            if session.broken is not None:
                raise BrokenOffError(session.broken)
        finally:
            self._sessions.remove(session)
            session.close()

    # For the sessions

    def heard(self, message: pb.SessionRequest) -> None:
        """Notes what a client has sent."""
        match message.WhichOneof("message"):
            case "generate":
                self.seen.requests.append(message.generate)
            case "cancel":
                self.seen.cancelled.append(message.cancel.request_id)
            case "acknowledge":
                self.seen.acknowledged += message.acknowledge.request_ids
            case "heartbeat":
                self.seen.num_heartbeats += 1

    def begin(self, request: pb.GenerateRequest, session: FakeSession) -> PlayedRequest:
        """Or attaches the session to one that plays. `RefusedError`."""
        if self.refusal is not None:
            raise RefusedError(self.refusal)
        key, attachment = (request.tenant, request.request_id), max(request.attachment, 1)
        if attachment > 1 and self.resume_refusals:
            raise RefusedError(self.resume_refusals.pop(0))
        played = self._requests.get(key)
        if played is None:
            steps, spent = self.steps_for(request), self._spent.setdefault(key, set())
            played = self._requests[key] = PlayedRequest(self, request, steps, spent)
            played.listener = session
        elif attachment > played.attachment:
            played.attach(session, request)
        elif attachment == played.attachment:
            message = f"request_id {request.request_id!r} is in use"
            raise RefusedError(Fail(grpc.StatusCode.ALREADY_EXISTS, message, "DUPLICATE_REQUEST"))
        else:
            raise RefusedError(stale(request.request_id, played.attachment))
        return played

    def cancel(self, tenant: str, request_id: str) -> bool:
        played = self._requests.get((tenant, request_id))
        return played is not None and played.cancel()

    def acknowledge(self, request_id: str) -> None:
        for key, played in tuple(self._requests.items()):
            if key[1] == request_id and played.is_over:
                self.forget(played)

    def forget(self, request: PlayedRequest) -> None:
        for key, played in tuple(self._requests.items()):
            if played is request:
                del self._requests[key]

    def die(self) -> None:
        for session in self._sessions:
            session.break_off(Break())
        for played in self._requests.values():
            played.stop()
        self._requests.clear()

    # Short calls

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:  # noqa: N802
        """In whichever session it plays."""
        await self._require_serving(context)
        if not self.cancel(request.tenant, request.request_id):
            await abort(context, Fail(grpc.StatusCode.NOT_FOUND, "no such request", "UNKNOWN_REQUEST"))
        self.seen.cancelled.append(request.request_id)
        return pb.CancelResponse()

    async def ListModels(  # noqa: N802
        self, _request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        await self._require_serving(context)
        return pb.ListModelsResponse(models=self.models)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: N802
        """The first one for the empty name."""
        await self._require_serving(context)
        for model in self.models:
            if request.model in ("", model.name):
                return pb.GetModelResponse(model=model)
        await abort(
            context, Fail(grpc.StatusCode.NOT_FOUND, f"no executor serves {request.model!r}", "UNKNOWN_MODEL", "model")
        )
        raise AssertionError("abort raises")

    async def Tokenize(self, request: pb.TokenizeRequest, _context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """One token per character, its code point."""
        text = request.text or " ".join(message.content for message in request.chat.messages)
        texts = list(text) if request.return_token_texts else []
        return pb.TokenizeResponse(token_ids=[ord(letter) for letter in text], token_texts=texts, max_model_len=2048)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        if any(token_id < 0 for token_id in request.token_ids):
            await abort(context, Fail(grpc.StatusCode.INVALID_ARGUMENT, "no such token", "BAD_TOKEN", "token_ids"))
        return pb.DetokenizeResponse(text="".join(chr(token_id) for token_id in request.token_ids))

    async def Generate(  # noqa: N802
        self, _request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Not played: the client uses Session."""
        await abort(context, Fail(grpc.StatusCode.UNIMPLEMENTED, "the fake server has no Generate: use Session"))
        yield pb.GenerateResponse()

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: N802
        """Every request that plays runs, at an executor "fake", with 4 drafts for each token of which 3 are right.

        It waits for what the test says that all do.
        """
        played = self._requests.get((request.tenant, request.request_id))
        if played is not None and not played.is_over:
            return pb.ExplainResponse(
                state=pb.REQUEST_STATE_RUNNING,
                waiting_for=self.waiting_for,
                executor="fake",
                num_output_tokens=played.num_output_tokens,
                num_draft_tokens=4 * played.num_output_tokens,
                num_accepted_draft_tokens=3 * played.num_output_tokens,
            )
        await abort(context, Fail(grpc.StatusCode.NOT_FOUND, "no such request", "UNKNOWN_REQUEST"))
        raise AssertionError("abort raises")

    async def Estimate(self, request: pb.EstimateRequest, _context: Context) -> pb.EstimateResponse:  # noqa: N802
        """A quarter of a second and then 10 ms per token, unless the script begins with a failure."""
        steps = self.steps_for(request.request)
        if steps and isinstance(steps[0], Fail):
            return pb.EstimateResponse(would_be_refused=request_error(steps[0]))
        response = pb.EstimateResponse(num_prompt_tokens=len(request.request.text), num_cached_tokens=1)
        response.time_to_first_token.FromMilliseconds(250)
        response.inter_token_time.FromMilliseconds(10)
        return response

    async def _require_serving(self, context: Context) -> None:
        if self.refusal is not None:
            await abort(context, self.refusal)

    def steps_for(self, request: pb.GenerateRequest) -> Sequence[Step]:
        return self.script(request) if callable(self.script) else self.script


async def abort(context: Context, failure: Fail) -> None:
    details = [pack(detail) for detail in error_details(failure)]
    status = status_pb2.Status(code=failure.code.value[0], message=failure.message, details=details)
    await context.abort(
        failure.code, failure.message, trailing_metadata=(("grpc-status-details-bin", status.SerializeToString()),)
    )
