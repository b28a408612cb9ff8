"""What callers get wrong first: each is told in one sentence, at the line that they wrote."""

import traceback

import grpc
import pytest
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from paceline_client import AsyncClient, Client, InvalidRequestError, Timeout, WrongServerError
from paceline_client.testing import Fail, FakeServer, say

REFUSAL = [Fail(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: is 7", "BAD", "sampling.top_p")]


async def refuse(_, context):
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "empty")


def service(name, method):
    """One that knows this method, and refuses what it does not like."""
    handlers = {method: grpc.unary_unary_rpc_method_handler(refuse)}
    return grpc.method_handlers_generic_handler(f"paceline.v1.{name}", handlers)


ADMIN, EXECUTOR = service("AdminService", "ListExecutors"), service("ExecutorService", "GetState")


@pytest.mark.parametrize(
    ("services", "has_health", "said"),
    [
        ([ADMIN], False, "is the admin port of a scheduler"),
        ([EXECUTOR], True, "is the port of an executor"),
        ([], True, "is a health port"),
        ([], False, "is a gRPC server of something else"),
    ],
    ids=["admin", "executor", "health", "another server"],
)
async def test_the_wrong_port_is_named_for_what_it_is(services, has_health, said):
    """Of a short call and of a request: `Method not found!` would say nothing."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(services)
    if has_health:
        add_HealthServicer_to_server(health.HealthServicer(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncClient(address) as client:
        for call in (client.list_models(), client.generate("?")):
            with pytest.raises(WrongServerError, match=f"{address} {said}") as caught:
                await call
            assert caught.value.reason == "WRONG_SERVER"
    await server.stop(None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompt": 5}, "prompt: must be a str, not int"),
        ({"messages": "hi"}, "messages: must be a list of messages, not str"),
        ({"messages": ["hi"]}, "messages[0]: must be a Message or a dict, not str"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content: must be a str, not list"),
        ({"prompt": "x", "sampling": 5}, "sampling: must be a Sampling or a dict, not int"),
        ({"prompt": "x", "stopping": {"max_token": 5}}, "stopping: has no 'max_token'; there is max_tokens"),
        ({"prompt": "x", "timeout": "5"}, "timeout: must be a number of seconds or a Timeout, not str"),
        ({"prompt": "x", "timeout": True}, "timeout: must be a number of seconds or a Timeout, not bool"),
        ({"prompt": "x", "timeout": 0}, "timeout: total_seconds must be above 0, not 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_argument_of_another_type_is_refused_in_a_sentence(arguments, sentence):
    async with AsyncClient("127.0.0.1:1") as client:
        for call in (client.generate, client.estimate):
            with pytest.raises(InvalidRequestError) as caught:
                await call(**arguments)
            assert str(caught.value).startswith(sentence)


async def test_settings_may_be_dicts_and_a_timeout_a_number():
    async with FakeServer(say("hi")) as server, AsyncClient(server.target, timeout=7) as client:
        await client.generate("?", sampling={"temperature": 0.0}, stopping={"max_tokens": 3}, timeout=5)
        await client.generate("?", timeout=Timeout(total_seconds=6))
        await client.generate("?")
        sent = server.seen.requests
    assert (sent[0].sampling.temperature, sent[0].stopping.max_tokens) == (0.0, 3)
    assert [round(request.timeout.seconds + request.timeout.nanos / 1e9) for request in sent] == [5, 6, 7]


def frames_inside(error):
    """What Python would print of this library, for an error that nobody catches."""
    printed = "".join(traceback.format_exception(error))
    assert "another exception" not in printed
    return [line for line in printed.splitlines() if "/paceline_client/" in line]


def test_an_error_points_to_the_callers_line():
    with FakeServer(REFUSAL) as server, Client(server.target) as client:
        for call in (
            lambda: client.generate("?"),
            lambda: list(client.stream("?")),
            lambda: client.stream("?").collect(),
            lambda: client.detokenize([2**40]),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                call()
            assert len(frames_inside(caught.value)) <= 2


async def test_an_error_points_to_the_line_that_awaited():
    async with FakeServer(REFUSAL) as server, AsyncClient(server.target) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate("?")
        assert len(frames_inside(caught.value)) <= 2
        stream = client.stream("?")
        with pytest.raises(InvalidRequestError) as caught:
            async for _ in stream:
                pass
        assert len(frames_inside(caught.value)) <= 2


def test_the_whole_way_of_an_error_is_logged(caplog):
    with caplog.at_level("DEBUG", "paceline_client"):
        test_an_error_points_to_the_callers_line()
    assert "in _next" in caplog.text
