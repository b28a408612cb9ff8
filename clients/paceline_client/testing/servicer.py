"""Plays scripts on the InferenceService. Knows the protocol as a server speaks it; has no model and no schedule."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2 as sampling_pb
from paceline.v1.inference_pb2_grpc import InferenceServiceServicer
from paceline_client.hashing import rolling_hash
from paceline_client.results import FinishReason
from paceline_client.testing.script import Break, Drain, End, Fail, Hold, Script, Step, Tokens

_REASONS = {
    None: sampling_pb.FINISH_REASON_ERROR,
    FinishReason.STOP: sampling_pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: sampling_pb.FINISH_REASON_CANCELLED,
}
Context = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]


@dataclass(slots=True)
class Seen:
    """What clients have sent, in the order of its arrival."""

    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    acknowledged: list[str] = field(default_factory=list)
    num_sessions: int = 0
    num_heartbeats: int = 0


class FakeServicer(InferenceServiceServicer):
    """One model, one script, any number of sessions."""

    def __init__(self, script: Script, *, models: Sequence[pb.Model], heartbeat_seconds: float | None) -> None:
        self.script = script
        self.models = list(models)
        self.seen = Seen()
        self.released = asyncio.Event()
        self._heartbeat_seconds = heartbeat_seconds
        self._sessions: list[_FakeSession] = []

    async def Session(  # noqa: N802  gRPC's spelling
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """Play the script for every request of the session; several deltas that wait go out in one message."""
        self.seen.num_sessions += 1
        session = _FakeSession(self, request_iterator)
        self._sessions.append(session)
        try:
            while (response := await session.next_response(self._heartbeat_seconds)) is not None:
                yield response
            if session.broken is not None:
                await context.abort(session.broken.code, session.broken.message)
        finally:
            self._sessions.remove(session)
            session.close()

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:  # noqa: N802
        """End the request, in whichever session it plays."""
        if not any(session.cancel(request.request_id) for session in self._sessions):
            await abort(context, Fail(grpc.StatusCode.NOT_FOUND, "no such request", "UNKNOWN_REQUEST"))
        self.seen.cancelled.append(request.request_id)
        return pb.CancelResponse()

    async def ListModels(  # noqa: N802
        self, _request: pb.ListModelsRequest, _context: Context
    ) -> pb.ListModelsResponse:
        """The models it was made with."""
        return pb.ListModelsResponse(models=self.models)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: N802
        """The model of that name, the first one for the empty name."""
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
        """The inverse of Tokenize."""
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
        """Every request that plays runs, at an executor of the name "fake"."""
        for session in self._sessions:
            num_output_tokens = session.num_output_tokens(request.request_id)
            if num_output_tokens is not None:
                return pb.ExplainResponse(
                    state=pb.REQUEST_STATE_RUNNING, executor="fake", num_output_tokens=num_output_tokens
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

    def steps_for(self, request: pb.GenerateRequest) -> Sequence[Step]:
        """What the script says to a request."""
        return self.script(request) if callable(self.script) else self.script


@dataclass(frozen=True, slots=True)
class _Playing:
    """A request whose script runs."""

    task: asyncio.Task[None]
    outputs: list[list[int]]
    """The tokens of each completion."""


class _FakeSession:
    """One open session: a task per request, and one queue of what they have to say."""

    def __init__(self, servicer: FakeServicer, incoming: AsyncIterator[pb.SessionRequest]) -> None:
        self._servicer = servicer
        self._outgoing: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self._playing: dict[str, _Playing] = {}
        self._takes_no_more = False
        self._listener = asyncio.create_task(self._listen(incoming))
        self.broken: Break | None = None

    async def next_response(self, heartbeat_seconds: float | None) -> pb.SessionResponse | None:
        """Everything that waits, as one message, or a heartbeat; None at the end of the session."""
        response = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(heartbeat_seconds):
                response = await self._outgoing.get()
                while response is not None and not self._outgoing.empty():
                    if (more := self._outgoing.get_nowait()) is None:
                        self._outgoing.put_nowait(None)
                        return response
                    response.MergeFrom(more)
                return response
        return pb.SessionResponse(heartbeat=pb.Heartbeat())

    def close(self) -> None:
        """Stop everything that plays."""
        for task in (self._listener, *(playing.task for playing in self._playing.values())):
            task.cancel()

    def cancel(self, request_id: str) -> bool:
        """End a request with what it has; False when it does not play here."""
        playing = self._playing.pop(request_id, None)
        if playing is None:
            return False
        playing.task.cancel()
        for number, output in enumerate(playing.outputs):
            self._send(request_id, end_delta(End(FinishReason.CANCELLED, completion=number), output))
        self._end_if_done()
        return True

    def num_output_tokens(self, request_id: str) -> int | None:
        """How many tokens were sent of a request; None when it does not play here."""
        playing = self._playing.get(request_id)
        return None if playing is None else sum(len(output) for output in playing.outputs)

    async def _listen(self, incoming: AsyncIterator[pb.SessionRequest]) -> None:
        seen = self._servicer.seen
        async for message in incoming:
            match message.WhichOneof("message"):
                case "generate":
                    seen.requests.append(message.generate)
                    self._start(message.generate)
                case "cancel":
                    seen.cancelled.append(message.cancel.request_id)
                    self.cancel(message.cancel.request_id)
                case "acknowledge":
                    seen.acknowledged += message.acknowledge.request_ids
                case "heartbeat":
                    seen.num_heartbeats += 1
        self._takes_no_more = True
        self._end_if_done()

    def _start(self, request: pb.GenerateRequest) -> None:
        steps = self._servicer.steps_for(request)
        outputs: list[list[int]] = [[] for _ in range(request.sampling.n or 1)]
        task = asyncio.create_task(self._play(request.request_id, steps, outputs))
        self._playing[request.request_id] = _Playing(task, outputs)

    async def _play(self, request_id: str, steps: Sequence[Step], outputs: list[list[int]]) -> None:
        for step in steps:
            match step:
                case Tokens():
                    self._send(request_id, tokens_delta(step, outputs[step.completion]))
                    outputs[step.completion] += step.token_ids
                case End():
                    self._send(request_id, end_delta(step, outputs[step.completion]))
                case Fail():
                    failure = pb.SessionFailure(request_id=request_id, error=request_error(step))
                    self._outgoing.put_nowait(pb.SessionResponse(failures=[failure]))
                case Hold():
                    await self._servicer.released.wait()
                case Drain(reason):
                    self._takes_no_more = True
                    self._outgoing.put_nowait(pb.SessionResponse(drain=pb.Drain(reason=reason)))
                case Break():
                    self.broken = step
                    self._outgoing.put_nowait(None)
        del self._playing[request_id]
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._takes_no_more and not self._playing:
            self._outgoing.put_nowait(None)

    def _send(self, request_id: str, delta: pb.Delta) -> None:
        self._outgoing.put_nowait(pb.SessionResponse(deltas=[pb.SessionDelta(request_id=request_id, delta=delta)]))


def tokens_delta(step: Tokens, output: Sequence[int]) -> pb.Delta:
    """The delta of a step that follows this output."""
    logprobs = []
    if step.logprob is not None:
        logprobs = [sampling_pb.TokenLogprobs(token_id=token, logprob=step.logprob) for token in step.token_ids]
    prompt_logprobs = []
    if step.prompt_logprob is not None:
        prompt_logprobs = [sampling_pb.TokenLogprobs(token_id=0, logprob=step.prompt_logprob)]
    return pb.Delta(
        index=step.completion,
        prompt_logprobs=prompt_logprobs,
        offset=len(output) + step.offset_error,
        token_ids=step.token_ids,
        text=step.text,
        attempt=1,
        rolling_hash=rolling_hash([*output, *step.token_ids]) ^ step.hash_error,
        logprobs=logprobs,
    )


def end_delta(step: End, output: Sequence[int]) -> pb.Delta:
    """The last delta after this output."""
    finish = pb.Finish(
        reason=_REASONS[step.reason],
        usage=pb.Usage(
            num_prompt_tokens=step.num_prompt_tokens,
            num_cached_tokens=step.num_cached_tokens,
            num_output_tokens=len(output),
        ),
    )
    if isinstance(step.matched_stop, str):
        finish.stop_text = step.matched_stop
    elif step.matched_stop is not None:
        finish.stop_token_id = step.matched_stop
    return pb.Delta(
        index=step.completion, offset=len(output), attempt=1, rolling_hash=rolling_hash(output), finish=finish
    )


def error_details(failure: Fail) -> list[Message]:
    """The google.rpc messages that go with a failure."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=failure.reason, domain="paceline")]
    if failure.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=failure.field, description=failure.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if failure.retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(int(failure.retry_after_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def request_error(failure: Fail) -> sampling_pb.RequestError:
    """The failure as it travels inside a session."""
    packed = [_pack(detail) for detail in error_details(failure)]
    return sampling_pb.RequestError(
        code=failure.code.value[0],
        message=failure.message,
        details=[sampling_pb.ErrorDetail(type_url=item.type_url, value=item.value) for item in packed],
    )


async def abort(context: Context, failure: Fail) -> None:
    """End a call with the failure as its status."""
    details = [_pack(detail) for detail in error_details(failure)]
    status = status_pb2.Status(code=failure.code.value[0], message=failure.message, details=details)
    await context.abort(
        failure.code, failure.message, trailing_metadata=(("grpc-status-details-bin", status.SerializeToString()),)
    )


def _pack(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed
