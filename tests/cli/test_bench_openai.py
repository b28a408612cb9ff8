"""OpenAI-compatible endpoints, over real sockets, against a small stand-in that answers as it is told."""

import asyncio
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline_cli.bench.clock import Clock
from paceline_cli.bench.errors import EndpointError, NoOutputError
from paceline_cli.bench.openai_target import WORDS, OpenAITarget
from paceline_cli.bench.records import Counted
from paceline_cli.bench.targets import Outgoing
from paceline_client.errors import (
    AccessDeniedError,
    ConnectionLostError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServerError,
    StreamCorruptedError,
    UnavailableError,
)
from paceline_client.requests import Sampling

USAGE = {"usage": {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}}
MODELS = {"data": [{"id": "small", "max_model_len": 512}, {"id": "large"}]}


def token(text):
    """A message with a token."""
    return {"choices": [{"text": text}]}


class StandIn:
    """Answers every completion with the same messages, or with a status."""

    def __init__(
        self, *messages, status=200, models=MODELS, models_status=200, closes=False, content_type="text/event-stream"
    ):
        self.messages = messages
        self.status = status
        self.models = models
        self.models_status = models_status
        self.closes = closes
        self.content_type = content_type
        self.bodies = []
        self.headers = []
        self.connections = set()

    def __enter__(self):
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                """Nobody reads it."""

            def do_GET(self):
                stand_in.headers.append(dict(self.headers))
                self.answer(stand_in.models_status, "application/json", json.dumps(stand_in.models).encode())

            def do_POST(self):
                assert self.path == "/v1/completions"
                stand_in.connections.add(self.client_address)
                stand_in.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if stand_in.status != 200:
                    said = {"error": {"message": "said by the server"}}
                    self.answer(stand_in.status, "application/json", json.dumps(said).encode())
                else:
                    self.stream()

            def answer(self, status, content_type, body):
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def stream(self):
                self.send_response(200)
                self.send_header("Content-Type", stand_in.content_type)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for message in stand_in.messages:
                    text = message if isinstance(message, str) else f"data: {json.dumps(message)}\n\n"
                    self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
                if stand_in.closes:
                    self.close_connection = True
                else:
                    self.wfile.write(b"0\r\n\r\n")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def base_url(self):
        """What a user passes as --base-url."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"


async def connect(base_url, model=None, *, api_key=None, ignore_eos=True):
    """A target, greedy."""
    return await OpenAITarget.connect(
        base_url, model, Sampling(temperature=0.0), api_key=api_key, ignore_eos=ignore_eos, now=Clock().now
    )


@contextlib.asynccontextmanager
async def target_of(stand_in):
    """A connected target, closed in the end."""
    target = await connect(stand_in.base_url)
    try:
        yield target
    finally:
        await target.close()


async def send(target, times=None, symbols=(0, 1, 137)):
    """One request of three words and four tokens."""
    return await target.send(Outgoing(symbols, 4, "group"), [] if times is None else times)


async def test_messages_are_timed_and_tokens_counted_by_the_servers_usage():
    """Comments and the message that only has usage are no points in time."""
    stream = [token("a"), ": ping\n\n", token(""), token("b") | {"usage": None}, USAGE, "data: [DONE]\n\n"]
    with StandIn(*stream) as stand_in:
        async with target_of(stand_in) as target:
            times = []
            assert await send(target, times) == Counted(5, 4, 2)
    assert len(times) == 3
    assert times == sorted(times)


async def test_the_request_is_what_a_user_of_that_api_would_send():
    with StandIn(token("a"), USAGE) as stand_in:
        async with target_of(stand_in) as target:
            await send(target)
        other = await connect(stand_in.base_url, "large", ignore_eos=False)
        await send(other)
        await other.close()
    first, second = stand_in.bodies
    assert first == {
        "model": "small",
        "prompt": "the of three",
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert second["model"] == "large"
    assert "ignore_eos" not in second


async def test_without_usage_a_message_is_a_token():
    """And the prompt is taken to be as long as it was meant."""
    with StandIn(token("a"), token("b")) as stand_in:
        async with target_of(stand_in) as target:
            assert await send(target) == Counted(3, 2)


async def test_a_connection_is_used_again():
    """A new one per request would be measured as time to the first token."""
    with StandIn(token("a"), "data: [DONE]\n\n") as stand_in:
        async with target_of(stand_in) as target:
            for _ in range(3):
                await send(target)
            assert len(stand_in.connections) == 1
            await asyncio.gather(*(send(target) for _ in range(4)))
    assert len(stand_in.bodies) == 7


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequestError),
        (403, AccessDeniedError),
        (404, NotFoundError),
        (429, OverloadedError),
        (500, ServerError),
        (503, UnavailableError),
    ],
)
async def test_a_status_is_the_error_it_would_be_from_a_scheduler(status, kind):
    """So that failures have the same kinds everywhere, with what the server said."""
    with StandIn(status=status) as stand_in:
        async with target_of(stand_in) as target:
            with pytest.raises(kind, match=f"^HTTP {status}: said by the server$") as caught:
                await send(target)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        ([token("a"), {"error": {"message": "out of memory"}}], ServerError),
        ([token("a"), "data: {\n\n"], StreamCorruptedError),
        ([token("a"), "data: 7\n\n"], StreamCorruptedError),
        ([USAGE, "data: [DONE]\n\n"], NoOutputError),
        ([], NoOutputError),
    ],
)
async def test_a_stream_that_goes_wrong_is_an_error(stream, kind):
    """In the middle of it, or because nothing came."""
    with StandIn(*stream) as stand_in:
        async with target_of(stand_in) as target:
            with pytest.raises(kind):
                await send(target)


async def test_a_server_that_does_not_stream_is_told_from_one_that_does():
    """Its answer could not be timed."""
    with StandIn(token("a"), content_type="application/json") as stand_in:
        async with target_of(stand_in) as target:
            with pytest.raises(StreamCorruptedError, match="text/event-stream"):
                await send(target)


async def test_a_broken_connection_is_a_lost_one():
    with StandIn(token("a"), closes=True) as stand_in:
        async with target_of(stand_in) as target:
            times = []
            with pytest.raises(ConnectionLostError):
                await send(target, times)
    assert len(times) == 1


async def test_the_model_is_the_first_one_or_the_one_named():
    with StandIn() as stand_in:
        for name, expected in ((None, ("small", 512)), ("large", ("large", None))):
            target = await connect(stand_in.base_url, name)
            assert (target.served.model, target.served.max_model_len) == expected
            assert target.num_symbols == len(WORDS)
            await target.close()


async def test_a_key_travels_with_every_request():
    with StandIn() as stand_in:
        await (await connect(stand_in.base_url, api_key="secret")).close()
    assert stand_in.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("base_url", ["http://127.0.0.1:1/v1", "localhost:8000/v1", "http://[/v1"])
async def test_no_server_says_where_none_was_found(base_url):
    with pytest.raises(EndpointError) as caught:
        await connect(base_url)
    assert base_url in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"models": {"models": []}}, EndpointError, "does not answer as OpenAI's API does"),
        ({"models": []}, EndpointError, "does not answer as OpenAI's API does"),
        ({"models_status": 404}, EndpointError, r"Does --base-url end in /v1\?"),
        ({"models_status": 401}, AccessDeniedError, "Set OPENAI_API_KEY"),
        ({"models_status": 503}, UnavailableError, "HTTP 503"),
        ({"models": {"data": []}}, EndpointError, "no model"),
    ],
)
async def test_a_server_that_cannot_be_measured_says_what_to_do(options, kind, expected):
    with StandIn(**options) as stand_in, pytest.raises(kind, match=expected):
        await connect(stand_in.base_url)


async def test_a_name_is_enough_for_a_server_that_lists_no_models():
    with StandIn(models_status=404) as stand_in:
        target = await connect(stand_in.base_url, "mine")
        await target.close()
    assert target.served.model == "mine"
