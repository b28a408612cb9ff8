"""Requests of models that no executor has served here yet wait for one at the edge: nobody could tokenise them."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from edge_rig import tiny
from edge_rig.edge_client import EdgeClient
from paceline.plan.values import Claim, FinishReason, RecordId
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.core.answers import RequestState
from paceline_scheduler.core.limits import LimitValues
from paceline_scheduler.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    OutageError,
    QueueFullError,
    StandbyError,
    UnknownModelError,
)


def request(name="a", *, model=tiny.MODEL.name, **fields):
    return GenerateRequest(request_id=name, model=model, text="hi", **fields)


@pytest.fixture
def waiting(client, edge):
    """Sends a request while nobody has said what it serves; returns the task that starts it."""
    edge.backend.come(may_come=True)
    tasks = []

    async def send(message):
        tasks.append(asyncio.ensure_future(client.send(message)))
        for _ in range(3):
            await asyncio.sleep(0)
        return tasks[-1]

    yield send
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("model", [tiny.MODEL.name, ""])
async def test_a_request_waits_until_an_executor_says_that_it_serves_its_model(edge, waiting, model):
    sent = await waiting(request(model=model, waited=Duration(seconds=2)))
    explained = edge.explain(RecordId("", "a"))
    assert explained.state is RequestState.WAITING
    assert "has to attach" in explained.waiting_for
    edge.backend.clock.advance(10)
    edge.backend.come(tiny.MODEL)
    (handle,) = await sent
    assert edge.backend.asked.requests[handle].waited_s == 12.0, "it keeps its place in the queue"


async def test_a_model_that_no_executor_serves_is_refused_once_all_have_spoken(edge, waiting):
    sent = await waiting(request(model="another"))
    edge.backend.come(tiny.MODEL, may_come=True)
    await asyncio.sleep(0)
    assert not sent.done()
    edge.backend.come(tiny.MODEL)
    with pytest.raises(UnknownModelError, match="another"):
        await sent


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_outage": Duration(nanos=1)}, OutageError),
        ({"timeout": Duration(nanos=1)}, DeadlineExceededError),
        ({"waited": Duration(seconds=60)}, OutageError),
        ({"max_outage": Duration(seconds=-1)}, InvalidRequestError),
        ({"priority": 1000}, InvalidRequestError),
    ],
)
async def test_a_request_waits_as_long_as_it_may_and_a_wrong_one_not_at_all(edge, waiting, fields, error):
    with pytest.raises(error):
        await (await waiting(request(**fields)))
    assert edge.requests.by_key(RecordId("", "a")) is None


async def test_a_request_that_is_cancelled_or_left_waits_no_longer(edge, client, waiting):
    cancelled, left = await waiting(request("a")), await waiting(request("b"))
    await edge.cancel(RecordId("", "a"))
    await cancelled
    assert client.delta().finish.reason is FinishReason.CANCELLED
    client.leave()
    await left
    assert not edge.backend.asked.requests


async def test_a_scheduler_that_drains_or_stands_by_lets_nobody_wait(edge, waiting):
    sent = await waiting(request())
    edge.drain("shutting down", 1.0)
    edge.backend.come(may_come=True)
    with pytest.raises(DrainingError):
        await sent


async def test_a_scheduler_that_is_displaced_sends_those_that_wait_to_the_next_one(edge, waiting):
    sent = await waiting(request())
    edge.backend.active = Claim(7, "other", "there:1")
    edge.backend.come(may_come=True)
    with pytest.raises(StandbyError):
        await sent


@pytest.mark.parametrize(
    "bounds", [(3 + 2, 4_194_304), (1024, 70 + 2 * request().ByteSize())], ids=["requests", "bytes"]
)
async def test_as_many_requests_wait_as_the_queue_takes(edge, waiting, bounds):
    """The backend's queue has 3 requests of 70 tokens; a byte counts as a token as long as nobody can tell."""
    edge.backend.limit_values = LimitValues(*bounds, 2048)
    first, _ = await waiting(request("a")), await waiting(request("b"))
    with pytest.raises(QueueFullError):
        await (await waiting(request("c")))
    await edge.cancel(RecordId("", "a"))
    await first
    sent = await waiting(request("d"))
    edge.backend.come(tiny.MODEL)
    assert await sent


async def test_generate_waits_too_and_ends_with_its_typed_error(server, stub):
    server.backend.come(may_come=True)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub.Generate(request(max_outage=Duration(nanos=1000)))))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    other = EdgeClient(server.edge)
    sent = asyncio.ensure_future(other.send(request("b")))
    server.backend.come(tiny.MODEL)
    assert await sent
    other.leave()
