"""OpenAI-compatible endpoints, over real sockets, against a small stand-in that answers as it is told."""

import asyncio
import contextlib

import pytest

from paceline_cli.bench.clock import Clock
from paceline_cli.bench.errors import EndpointError, NoOutputError
from paceline_cli.bench.openai_target import WORDS, OpenAITarget
from paceline_cli.bench.records import Counted
from paceline_cli.bench.targets import Outgoing
from paceline_client import errors
from paceline_client.requests import Sampling

USAGE = {"usage": {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}}
DONE = "data: [DONE]\n\n"


def token(text):
    return {"choices": [{"text": text}]}


@pytest.fixture
async def connect(openai_server):
    """Connect greedy targets to servers or addresses; all are closed in the end."""
    async with contextlib.AsyncExitStack() as targets:

        async def connect(server, model=None, *, api_key=None, ignore_eos=True):
            base_url = server if isinstance(server, str) else server.base_url
            target = await OpenAITarget.connect(
                base_url, model, Sampling(temperature=0.0), api_key=api_key, ignore_eos=ignore_eos, now=Clock().now
            )
            targets.push_async_callback(target.close)
            return target

        yield connect


async def send(target, times=None, symbols=(0, 1, 137)):
    """One request of three words and four tokens."""
    return await target.send(Outgoing(symbols, 4, "group"), [] if times is None else times)


@pytest.mark.parametrize(
    ("stream", "counted", "num_times"),
    [
        # Comments and the message that only has usage are no points in time.
        ([token("a"), ": ping\n\n", token(""), token("b") | {"usage": None}, USAGE, DONE], Counted(5, 4, 2), 3),
        # Without usage a message is a token, and the prompt is taken to be as long as it was meant.
        ([token("a"), token("b")], Counted(3, 2), 2),
    ],
    ids=["usage", "no usage"],
)
async def test_messages_are_timed_and_tokens_counted_by_the_servers_usage(
    openai_server, connect, stream, counted, num_times
):
    times = []
    assert await send(await connect(openai_server(*stream)), times) == counted
    assert len(times) == num_times
    assert times == sorted(times)


async def test_the_request_is_what_a_user_of_that_api_would_send(openai_server, connect):
    server = openai_server(token("a"), USAGE)
    await send(await connect(server))
    await send(await connect(server, "large", ignore_eos=False))
    first, second = server.bodies
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


async def test_a_connection_is_used_again(openai_server, connect):
    """A new one per request would be measured as time to the first token."""
    server = openai_server(token("a"), DONE)
    target = await connect(server)
    for _ in range(3):
        await send(target)
    assert len(server.connections) == 1
    await asyncio.gather(*(send(target) for _ in range(4)))
    assert len(server.bodies) == 7


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidRequestError),
        (403, errors.AccessDeniedError),
        (404, errors.NotFoundError),
        (429, errors.OverloadedError),
        (500, errors.ServerError),
        (503, errors.UnavailableError),
    ],
)
async def test_a_status_is_the_error_it_would_be_from_a_scheduler(openai_server, connect, status, kind):
    """So that failures have the same kinds everywhere, with what the server said."""
    target = await connect(openai_server(status=status))
    with pytest.raises(kind, match=f"^HTTP {status}: said by the server$") as caught:
        await send(target)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("stream", "options", "kind", "sentence"),
    [
        ([token("a"), {"error": {"message": "out of memory"}}], {}, errors.ServerError, "out of memory"),
        ([token("a"), "data: {\n\n"], {}, errors.StreamCorruptedError, "a message is not what"),
        ([token("a"), "data: 7\n\n"], {}, errors.StreamCorruptedError, "a message is not what"),
        ([USAGE, DONE], {}, NoOutputError, "without a token"),
        ([], {}, NoOutputError, "without a token"),
        # Its answer could not be timed.
        ([token("a")], {"content_type": "application/json"}, errors.StreamCorruptedError, "text/event-stream"),
        ([token("a")], {"closes": True}, errors.ConnectionLostError, r"\w"),
    ],
    ids=["error", "no JSON", "no object", "no token", "nothing", "no stream", "broken connection"],
)
async def test_a_stream_that_goes_wrong_is_an_error(openai_server, connect, stream, options, kind, sentence):
    """In the middle of it, or because nothing came; what had come by then was timed."""
    target, times = await connect(openai_server(*stream, **options)), []
    with pytest.raises(kind, match=sentence):
        await send(target, times)
    assert len(times) == (0 if "content_type" in options else stream.count(token("a")))


@pytest.mark.parametrize(
    ("options", "name", "served"),
    [
        ({}, None, ("small", 512)),
        ({}, "large", ("large", None)),
        ({"models_status": 404}, "mine", ("mine", None)),  # a name is enough for a server that lists no models
    ],
)
async def test_the_model_is_the_first_one_or_the_one_named(openai_server, connect, options, name, served):
    target = await connect(openai_server(**options), name)
    assert (target.served.model, target.served.max_model_len) == served
    assert target.num_symbols == len(WORDS)


async def test_a_key_travels_with_every_request(openai_server, connect):
    server = openai_server()
    await connect(server, api_key="secret")
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("base_url", ["http://127.0.0.1:1/v1", "localhost:8000/v1", "http://[/v1"])
async def test_no_server_says_where_none_was_found(connect, base_url):
    with pytest.raises(EndpointError) as caught:
        await connect(base_url)
    assert base_url in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"models": {"models": []}}, EndpointError, "does not answer as OpenAI's API does"),
        ({"models": []}, EndpointError, "does not answer as OpenAI's API does"),
        ({"models_status": 404}, EndpointError, r"Does --base-url end in /v1\?"),
        ({"models_status": 401}, errors.AccessDeniedError, "Set OPENAI_API_KEY"),
        ({"models_status": 503}, errors.UnavailableError, "HTTP 503"),
        ({"models": {"data": []}}, EndpointError, "no model"),
    ],
)
async def test_a_server_that_cannot_be_measured_says_what_to_do(openai_server, connect, options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        await connect(openai_server(**options))
