"""The fake server checks what clients say to hold, or the tests that use it would pass whatever they say."""

import asyncio

import grpc
import pytest

from paceline.v1 import inference_pb2 as pb
from paceline_client import ConflictError
from paceline_client.hashing import EMPTY_HASH, rolling_hash
from paceline_client.testing import End, Hold, Tokens
from paceline_client.testing.rig import MemoryRig
from virtual_time import in_virtual_time


def _raw_session(rig):
    """A session that sends what it is told: a queue of its messages, and its responses."""
    messages = asyncio.Queue()

    async def sent():
        while True:
            yield await messages.get()

    return messages, rig.servicer.serve(sent())


def _resume(rig, **fields):
    """The first request that was seen, as another attachment."""
    message = pb.SessionRequest()
    message.generate.CopyFrom(rig.seen.requests[0])
    for name, value in fields.items():
        if name == "prior_output_token_ids":
            message.generate.prior_output_token_ids.extend(value)
        else:
            setattr(message.generate, name, value)
    return message


async def _told(responses):
    """The first response that is not a heartbeat."""
    while True:
        response = await anext(responses)
        if not response.HasField("heartbeat"):
            return response


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"attachment": 1}, grpc.StatusCode.ALREADY_EXISTS),
        ({"attachment": 2, "resume_from": 1, "resume_hash": EMPTY_HASH}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"attachment": 2, "resume_from": 3, "resume_hash": 5}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"attachment": 2, "text": "another"}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"attachment": 2, "tenant": "red", "resume_from": 1}, grpc.StatusCode.FAILED_PRECONDITION),
        (
            {"attachment": 2, "tenant": "red", "resume_from": 1, "prior_output_token_ids": [1]},
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
    ids=["equal", "hash", "offset", "body", "tenant", "prior"],
)
@in_virtual_time
async def test_the_fake_server_refuses_what_is_not_held(fields, code):
    rig = MemoryRig([Tokens((1,), "a"), Tokens((2,), "b"), Hold()])
    stream = rig.stream()
    await anext(stream)
    messages, responses = _raw_session(rig)
    messages.put_nowait(_resume(rig, **fields))
    [failure] = (await _told(responses)).failures
    assert failure.error.code == code.value[0]


@in_virtual_time
async def test_the_fake_server_refuses_an_older_attachment():
    rig = MemoryRig([Tokens((1,), "a"), Hold()], break_after=[1])
    stream = rig.stream()
    reading = asyncio.create_task(stream.collect())
    await rig.until(lambda seen: len(seen.requests) == 1)
    rig.server.go_down()
    rig.server.come_up()
    await rig.until(lambda seen: len(seen.requests) == 2)
    messages, responses = _raw_session(rig)
    messages.put_nowait(_resume(rig, attachment=1))
    [failure] = (await _told(responses)).failures
    assert failure.error.code == grpc.StatusCode.ABORTED.value[0]
    reading.cancel()


@in_virtual_time
async def test_a_newer_attachment_takes_the_request_over():
    rig = MemoryRig([Tokens((1,), "a"), Hold(), Tokens((2,), "b"), End()])
    older = rig.stream()
    await anext(older)
    messages, responses = _raw_session(rig)
    messages.put_nowait(_resume(rig, attachment=2, resume_from=1, resume_hash=rolling_hash([1])))
    newer = asyncio.create_task(_told(responses))
    with pytest.raises(ConflictError, match="newer attachment"):
        await older.collect()
    rig.servicer.released.set()
    assert (await newer).deltas[0].delta.offset == 1
    assert rig.seen.cancelled == []
