"""What clients and the commands read of servers: answers and errors of short calls, and those of OpenAI's API.

Each input is an answer: its first byte says to which call.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import httpx2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from fuzzing.target import Target, event_loop
from paceline.v1 import admin_pb2, sampling_pb2
from paceline.v1 import inference_pb2 as pb
from paceline_cli.bench import openai_target
from paceline_cli.bench.targets import Outgoing, Served
from paceline_cli.top import wire as top
from paceline_client import wire
from paceline_client.config import Timeout
from paceline_client.errors import PacelineError
from paceline_client.requests import Sampling, Text, make_request

_ANSWERED_S = 5.0
_METADATA_KEY = "grpc-status-details-bin"


class _Server:
    """A channel to a server that answers each call with these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def unary_unary(
        self, path: str, request_serializer: object, response_deserializer: Callable[[bytes], Message], **_: object
    ) -> Callable[..., Awaitable[Message]]:
        del path, request_serializer

        async def call(request: Message, timeout: float, metadata: object) -> Message:  # noqa: ASYNC109  as gRPC has it
            del request, timeout, metadata
            return response_deserializer(self._data)

        return call

    def unary_stream(
        self, path: str, request_serializer: object, response_deserializer: Callable[[bytes], Message], **_: object
    ) -> Callable[..., AsyncIterator[Message]]:
        """Return what makes a call with one answer."""
        del path, request_serializer

        async def call(request: Message, metadata: object) -> AsyncIterator[Message]:
            del request, metadata
            yield response_deserializer(self._data)

        return call

    def stream_stream(self, *_: object, **__: object) -> None:
        """Nobody calls it here."""


_REQUEST = make_request(
    Text("Hi"),
    sampling=None,
    stopping=None,
    output=None,
    scheduling=None,
    structured=None,
    model=None,
    tenant="",
    timeout=Timeout(),
)
_CALLS: tuple[Callable[[wire.CallChannel], Awaitable[object]], ...] = (
    lambda on: wire.list_models(on, timeout_seconds=_ANSWERED_S),
    lambda on: wire.get_model(on, "m", timeout_seconds=_ANSWERED_S),
    lambda on: wire.explain(on, tenant="", request_id="r", timeout_seconds=_ANSWERED_S),
    lambda on: wire.estimate(on, _REQUEST, max_bytes=1000, timeout_seconds=_ANSWERED_S),
    lambda on: wire.tokenize(on, Text("Hi"), model="", with_texts=True, timeout_seconds=_ANSWERED_S),
    lambda on: wire.detokenize(
        on, [1], model="", skip_special_tokens=None, preceding_token_ids=[2], timeout_seconds=_ANSWERED_S
    ),
    lambda on: top.overview(on, _ANSWERED_S),
    lambda on: top.get_limits(on, _ANSWERED_S),
    lambda on: anext(top.steps(on), None),
)


def read_answer(data: bytes) -> None:
    """Be a client that is answered so, or refused with these details."""
    if not data:
        return
    server: Any = _Server(data[1:])
    with suppress(DecodeError, PacelineError):  # the first is gRPC's own
        event_loop().run_until_complete(_CALLS[data[0] % len(_CALLS)](wire.CallChannel(server)))
    code = list(grpc.StatusCode)[data[0] % len(grpc.StatusCode)]
    refusal = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata((_METADATA_KEY, data[1:])), "")
    assert str(wire.error_from_call(refusal)), "an error has a sentence"
    wire.is_answered(refusal)


def _sound_answers() -> Iterator[bytes]:
    model = pb.Model(name="m", vocab_size=9, default_sampling=sampling_pb2.SamplingParams(temperature=0.5))
    estimate = pb.EstimateResponse(num_prompt_tokens=3, would_be_refused=sampling_pb2.RequestError(code=8))
    estimate.time_to_first_token.FromMilliseconds(7)
    answers: tuple[Message, ...] = (
        pb.ListModelsResponse(models=[model]),
        pb.GetModelResponse(model=model),
        pb.ExplainResponse(state=pb.REQUEST_STATE_RUNNING, executor="e:1"),
        estimate,
        pb.TokenizeResponse(token_ids=[1], token_texts=["a"]),
        pb.DetokenizeResponse(text="a"),
        admin_pb2.ListRequestsResponse(requests=[admin_pb2.RequestView(tenant="t", request_id="r")]),
        admin_pb2.GetLimitsResponse(limits=admin_pb2.Limits(max_num_queued_reqs=3)),
        admin_pb2.WatchStepsResponse(first_token_ns=[5], between_tokens_ns=[7], num_between_tokens=[2]),
    )
    for number, answer in enumerate(answers):
        yield bytes([number]) + answer.SerializeToString()
    yield b"\6" + admin_pb2.ListExecutorsResponse(executors=[admin_pb2.ExecutorView(address="e:1")]).SerializeToString()
    status = status_pb2.Status(code=8, message="full")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", metadata={"a": "b"}))
    delay = error_details_pb2.RetryInfo()
    delay.retry_delay.FromMilliseconds(500)
    status.details.add().Pack(delay)
    yield b"\x08" + status.SerializeToString()


def read_openai(data: bytes) -> None:
    """Be the benchmark of a server that lists its models so, streams an answer so, or refuses so."""
    if data:
        with suppress(PacelineError):
            event_loop().run_until_complete(_asked(data[0], data[1:]))
        event_loop().run_until_complete(asyncio.sleep(0))  # generators that were left end


async def _asked(number: int, data: bytes) -> None:
    status, kind = ((200, "text/event-stream"), (200, "application/json"), (503, "application/json"))[number % 3]
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, headers={"Content-Type": kind}, content=data))
    async with httpx2.AsyncClient(transport=transport, base_url="http://server/v1") as http:
        if number % 3 == 1:
            served = await openai_target.model_of(http, "http://server/v1", None)
            assert isinstance(served.model, str), "it is a name"
            return
        clock = itertools.count()
        target = openai_target.OpenAITarget(
            http, Served("m", None), Sampling(), ignore_eos=True, now=lambda: float(next(clock))
        )
        counted = await target.send(Outgoing((1, 2), 4, ""), [])
        assert type(counted.num_output_tokens) is int, "it is a number"


def _sound_http() -> Iterator[bytes]:
    first = b'data: {"choices": [{"index": 0, "text": " of"}]}\n\n'
    usage = b'{"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": null}'
    last = b'data: {"choices": [], "usage": ' + usage + b"}\n\n"
    yield b"\0" + first * 2 + last + b"data: [DONE]\n\n"
    yield b"\0" + first + b'data: {"error": {"message": "no", "code": 500}}\n\n'
    yield b'\1{"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}'
    yield b'\2{"error": {"message": "full"}}'


TARGETS = (
    Target("client-answers", read_answer, _sound_answers),
    Target("openai-answers", read_openai, _sound_http),
)
