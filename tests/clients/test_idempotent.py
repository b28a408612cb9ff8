"""A request that is sent again by somebody else, with its id: read from its beginning, computed once."""

import pytest

from paceline_client import AsyncClient, ConflictError, InvalidRequestError
from paceline_client.testing import End, FakeServer, Hold, Tokens, say

HELD = [Tokens((1,), "a"), Hold(), Tokens((2,), "b"), End()]


async def first_delta(client, **options):
    """A stream of which one delta was read, and which is idempotent unless told otherwise."""
    stream = client.stream("?", **{"request_id": "r", "idempotent": True} | options)
    assert (await anext(stream)).text == "a"
    return stream


async def test_the_latest_of_several_clients_has_all_of_it_and_the_others_are_told():
    async with (
        FakeServer(HELD) as server,
        AsyncClient(server.target) as one,
        AsyncClient(server.target) as two,
        AsyncClient(server.target) as three,
    ):
        streams = [await first_delta(client) for client in (one, two, three)]
        server.release()
        assert (await streams[2].collect()).text == "ab"
        for stream in streams[:2]:
            with pytest.raises(ConflictError):
                await stream.collect()
        # The second is told that the id is in use, the third which attachment is the newest.
        assert [request.attachment for request in server.seen.requests] == [1, 1, 2, 1, 3]


async def test_what_has_ended_is_read_again_because_nobody_says_that_it_may_be_forgotten():
    async with FakeServer(say("one two")) as server, AsyncClient(server.target) as one:
        assert (await one.generate("?", request_id="r", idempotent=True)).text == "one two"
        await one.generate("?", request_id="other")
        await server.seen_that(lambda seen: "other" in seen.acknowledged)
        assert "r" not in server.seen.acknowledged
        async with AsyncClient(server.target) as two:
            again = await two.generate("?", request_id="r", idempotent=True)
        assert (again.text, again.attempt) == ("one two", 1)


async def test_one_with_another_body_is_refused_and_disturbs_nobody():
    async with FakeServer(HELD) as server, AsyncClient(server.target) as one, AsyncClient(server.target) as two:
        stream = await first_delta(one)
        with pytest.raises(InvalidRequestError, match="another request") as refusal:
            await two.generate("!", request_id="r", idempotent=True)
        assert refusal.value.reason == "RESUME_MISMATCH"
        server.release()
        assert (await stream.collect()).text == "ab"


async def test_an_id_in_use_stays_refused_to_who_does_not_ask_for_this():
    async with FakeServer(HELD) as server, AsyncClient(server.target) as one, AsyncClient(server.target) as two:
        await first_delta(one, idempotent=False)
        with pytest.raises(ConflictError):
            await two.generate("?", request_id="r")


async def test_a_trace_of_the_callers_goes_with_the_request():
    trace = {"traceparent": f"00-{1:032x}-{2:016x}-01", "tracestate": "a=b"}
    async with FakeServer(say("hi")) as server, AsyncClient(server.target) as client:
        await client.generate("?", trace=trace)
        sent = server.seen.requests[0]
        assert (sent.trace_parent, sent.trace_state) == (trace["traceparent"], "a=b")
