"""What clients and operators send to a scheduler, and what clients read of it: by the handlers that gRPC would call.

Each input is a call: its first byte says of which method, the rest is the message, or the messages of a session.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tokenizers import byte_level_tokenizer, served_model, tokenizer_source, try_here
from fuzzing.target import Target, framed, unframed
from paceline.process.metrics import Meter
from paceline.v1 import admin_pb2, sampling_pb2
from paceline.v1 import inference_pb2 as pb
from paceline.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from paceline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from paceline_client import wire
from paceline_client.errors import PacelineError
from paceline_client.inbox import Transcript
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.servicer_admin import AdminServicer, Observed
from paceline_scheduler.api.servicer_guard import Guard
from paceline_scheduler.api.servicer_inference import InferenceServicer
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.observers.definitions import COUNTED

_CALLS_PER_EDGE = 1000
_TURNS = 30
"""Of the event loop: a call that was not answered in so many waits for tokens, and its client goes."""
_MAX_STATUS_BYTES = 8192  # what a client of gRPC takes of headers
_MAX_MESSAGES = 8
_DEFECTS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})


class _Recorder:
    """What generated code takes for a server; it only remembers who would answer."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Be told the same as below."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


class _Context:
    """A call without a connection. `refused_with` is how it was refused."""

    def __init__(self) -> None:
        self.refused_with: grpc.StatusCode | None = None

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def done(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    async def write(self, message: Message) -> None:
        message.SerializeToString()

    async def abort(
        self, code: grpc.StatusCode, sentence: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> NoReturn:
        """End with an error that fits into headers."""
        self.refused_with = code
        num_bytes = len(sentence.encode()) + sum(len(key) + len(value) for key, value in metadata)
        assert num_bytes <= _MAX_STATUS_BYTES, f"a refusal of {num_bytes} bytes"
        assert sentence, "a refusal says why"
        raise grpc.aio.AbortError


class _Services:
    """Both services of a scheduler over a scripted backend, and the event loop that they run on."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._num_calls = 0
        self._behaviours: list[Callable[..., Awaitable[object]]] = []
        self._kinds: list[bool] = []  # whether a method takes a stream
        self._texts: Texts | None = None

    def call(self, data: bytes) -> None:
        self.loop.run_until_complete(self._call(data))

    async def _call(self, data: bytes) -> None:
        if self._num_calls % _CALLS_PER_EDGE == 0:
            await self._begin()
        self._num_calls += 1
        number, message = data[0] % len(self._behaviours), data[1:]
        request = _each(unframed(message, _MAX_MESSAGES)) if self._kinds[number] else message
        context = _Context()
        task = asyncio.ensure_future(self._behaviours[number](request, context))
        for _ in range(_TURNS):
            await asyncio.sleep(0)
            if task.done():
                break
        task.cancel()
        with suppress(grpc.aio.AbortError, asyncio.CancelledError):
            await task
        assert context.refused_with not in _DEFECTS, f"answered {context.refused_with}; the log says why"

    async def _begin(self) -> None:
        """Start anew: a backend remembers all that it was asked."""
        if self._texts is not None:
            await self._texts.close()
        recorder: Any = _Recorder()
        limits = EdgeLimits()
        model = served_model(tokenizer_source(byte_level_tokenizer(), eos_token="<|im_end|>", chat_template=None))
        backend = ScriptedBackend(model)
        self._texts = Texts(limits, datetime.now, trial=try_here)
        edge = Edge(backend, backend, self._texts, limits)
        backend.sink = edge.delivery
        await self._texts.model(model)
        add_InferenceServiceServicer_to_server(InferenceServicer(edge), recorder)
        servicer = AdminServicer(backend, backend, "scheduler-1", Observed(backend.watch, Meter(COUNTED), lambda: 0))
        add_AdminServiceServicer_to_server(servicer, recorder)
        self._behaviours, self._kinds = [], []
        for method in METHODS:
            guarded = await Guard().intercept_service(_answering(recorder.handlers[method]), _Details(method))
            assert guarded is not None, "every method has a handler"
            behaviour: Any = guarded.stream_stream or guarded.unary_stream or guarded.unary_unary
            self._behaviours.append(behaviour)
            self._kinds.append(guarded.request_streaming)


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


def _answering(handler: object) -> Callable[[grpc.HandlerCallDetails], Awaitable[Any]]:
    async def continuation(_: grpc.HandlerCallDetails) -> object:
        return handler

    return continuation


async def _each(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


_SERVICES = (
    pb.DESCRIPTOR.services_by_name["InferenceService"],
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
)
METHODS = tuple(f"/{service.full_name}/{method.name}" for service in _SERVICES for method in service.methods)


@cache
def _services() -> _Services:
    return _Services()


def take_call(data: bytes) -> None:
    if data:
        _services().call(data)


def _requests() -> list[pb.GenerateRequest]:
    text = pb.GenerateRequest(request_id="r", text="Hello", resumable=True, attachment=1)
    text.stopping.max_tokens = 4
    text.stopping.stop.append("END")
    text.sampling.seed = 7
    text.sampling.logit_bias[3] = 0.5
    text.sampling.bad_words.append("no")
    text.output.logprobs = 2
    ids = pb.GenerateRequest(request_id="s", token_ids=pb.TokenIds(ids=[1, 2]), resume_from=1, tenant="t")
    ids.sampling.n = 2
    ids.prior_output_token_ids.extend([5])
    ids.timeout.FromMilliseconds(500)
    chat = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")]))
    return [text, ids, chat]


def _sound_calls() -> Iterator[bytes]:
    requests = _requests()
    messages: dict[str, Sequence[Message]] = {
        "Generate": requests,
        "Cancel": [pb.CancelRequest(request_id="r")],
        "GetModel": [pb.GetModelRequest(model="tiny")],
        "Tokenize": [pb.TokenizeRequest(text="Hello", return_token_texts=True)],
        "Detokenize": [pb.DetokenizeRequest(token_ids=[1, 2, 3])],
        "Explain": [pb.ExplainRequest(request_id="r")],
        "Estimate": [pb.EstimateRequest(request=requests[0])],
        "SetLimits": [
            admin_pb2.SetLimitsRequest(limits=admin_pb2.Limits(max_num_queued_reqs=3)),
            admin_pb2.SetLimitsRequest(limits=admin_pb2.Limits(tenants=[admin_pb2.TenantLimits(tenant="t")])),
        ],
        "ListRequests": [
            admin_pb2.ListRequestsRequest(tenant="t", states=[pb.REQUEST_STATE_RUNNING], page_size=2, page_token="7"),
        ],
        "WatchSteps": [admin_pb2.WatchStepsRequest(address="10.0.0.1:50061")],
        "SetPlanRecording": [admin_pb2.SetPlanRecordingRequest(name="all", raw=True)],
        "DrainExecutor": [admin_pb2.DrainExecutorRequest(address="10.0.0.1:50061")],
    }
    session = [pb.SessionRequest(generate=request) for request in requests]
    session += [pb.SessionRequest(acknowledge=pb.Acknowledge(request_ids=["r"]))]
    session += [pb.SessionRequest(cancel=pb.CancelRequest(request_id="r"))]
    session += [pb.SessionRequest(heartbeat=pb.Heartbeat())]
    for number, method in enumerate(METHODS):
        name = method.rpartition("/")[2]
        if name == "Session":
            yield bytes([number]) + framed(message.SerializeToString() for message in session)
        for message in messages.get(name, ()):
            yield bytes([number]) + message.SerializeToString()


def read_session(data: bytes) -> None:
    """Be a client that reads what a scheduler sends on a session."""
    transcript = Transcript("r", 0)
    for message in unframed(data, _MAX_MESSAGES):
        try:
            response = pb.SessionResponse.FromString(message)
        except DecodeError:
            return  # gRPC's own
        for _, error in wire.read_failures(response):
            assert str(error), "an error has a sentence"
        assert wire.drain_reason(response) != "", "it is a sentence"
        for delta in wire.read_deltas(response):
            try:
                transcript.accept(delta)
            except PacelineError:
                return


def _sound_sessions() -> Iterator[bytes]:
    begun = pb.SessionResponse()
    delta = begun.deltas.add(request_id="r").delta
    delta.text, delta.attempt = "Hi", 1
    delta.token_ids.extend([1, 2])
    ended = pb.SessionResponse()
    ended.deltas.add(request_id="r").delta.finish.reason = sampling_pb2.FINISH_REASON_STOP
    failed = pb.SessionResponse(drain=pb.Drain(reason="restart"))
    failed.failures.add(request_id="s").error.code = 8
    yield framed(message.SerializeToString() for message in (begun, ended, failed))


TARGETS = (
    Target("scheduler-calls", take_call, _sound_calls),
    Target("client-session", read_session, _sound_sessions),
)
