"""The threaded client is the asynchronous one, waited for: same signatures, same deltas, same results, same errors."""

import asyncio
import inspect
import threading

import grpc
import pytest

from paceline_client import (
    AsyncClient,
    AsyncStream,
    Client,
    ClientClosedError,
    PacelineError,
    RequestCancelledError,
    Retry,
    Sampling,
    Stream,
)
from paceline_client.testing import Break, Die, End, Fail, FakeServer, Hold, Tokens, say

SCRIPTS = {
    "words": say("one two three"),
    "nothing": [End()],
    "logprobs": [Tokens((4, 5), "x", logprob=-1.0), End(matched_stop=5)],
    "refused": [Fail(grpc.StatusCode.INVALID_ARGUMENT, "bad", "BAD", "sampling.top_p")],
    "full": [Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", retry_after_seconds=9)],
    "gap": [Tokens((1,), "a"), Tokens((2,), "b", offset_error=3)],
    "changed": [Tokens((1,), "a"), Tokens((2,), "b", hash_error=1)],
    "broken": [Tokens((1,), "a"), Break(), Tokens((2,), "b"), Break(), End()],
    "forgotten": [Tokens((1,), "a"), Die(), Tokens((2,), "b"), End()],
    "several": [Tokens((1,), "a"), Tokens((2,), "b", completion=1), End(completion=1), End()],
    "internal": [Tokens((1,), "a"), Fail(grpc.StatusCode.INTERNAL, "bug")],
}
RENAMED = {"aclose": "close"}


async def play_async(target, sampling):
    """The texts and offsets that came, and how it ended."""
    async with AsyncClient(target, retry=Retry(max_attempts=1)) as client:
        stream, came = client.stream("?", request_id="r", sampling=sampling), []
        try:
            async for delta in stream:
                came += [delta.offset, delta.text]
            return came, stream.result
        except PacelineError as error:
            return came, error


def play_sync(target, sampling):
    with Client(target, retry=Retry(max_attempts=1)) as client:
        stream, came = client.stream("?", request_id="r", sampling=sampling), []
        try:
            for delta in stream:
                came += [delta.offset, delta.text]
            return came, stream.result
        except PacelineError as error:
            return came, error


@pytest.mark.parametrize("name", SCRIPTS)
def test_both_see_the_same(name):
    sampling = Sampling(n=2 if name == "several" else None)
    with FakeServer(SCRIPTS[name]) as server:
        async_came, async_end = asyncio.run(play_async(server.target, sampling))
    with FakeServer(SCRIPTS[name]) as server:
        sync_came, sync_end = play_sync(server.target, sampling)
    assert sync_came == async_came
    if isinstance(async_end, PacelineError):
        assert type(sync_end) is type(async_end)
        assert vars(sync_end) == vars(async_end)
    else:
        assert sync_end == async_end


@pytest.mark.parametrize(("async_kind", "sync_kind"), [(AsyncClient, Client), (AsyncStream, Stream)])
def test_both_have_the_same_methods(async_kind, sync_kind):
    def methods(kind):
        public = {name: value for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}
        return {
            RENAMED.get(name, name): list(inspect.signature(f).parameters.values())[1:] for name, f in public.items()
        }

    assert methods(sync_kind) == methods(async_kind)
    constructors = [list(inspect.signature(kind.connect).parameters.values()) for kind in (AsyncClient, Client)]
    assert constructors[0] == constructors[1]


def test_dropping_a_stream_cancels():
    with FakeServer([Tokens((1,), "a"), Hold()]) as server, Client(server.target) as client:
        for _ in client.stream("?", request_id="r1"):
            break
        server.wait_for(lambda seen: seen.cancelled == ["r1"])


def test_one_client_serves_many_threads():
    with FakeServer(lambda request: say(request.text)) as server, Client(server.target) as client:
        answers = {}

        def ask(text):
            answers[text] = client.generate(text).text

        threads = [threading.Thread(target=ask, args=(f"thread {n}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(text == answer for text, answer in answers.items())
        assert (len(answers), server.seen.num_sessions) == (8, 1)


def test_closing_joins_the_thread():
    """And is final: a second close does nothing, a request is a typed error."""
    with FakeServer(say("hi")) as server:
        client = Client(server.target)
        assert client.generate("?").text == "hi"
        assert any(thread.name == "paceline-client" for thread in threading.enumerate())
        client.close()
        client.close()
        assert not any(thread.name == "paceline-client" for thread in threading.enumerate())
        with pytest.raises(ClientClosedError):
            client.generate("?")


def test_a_client_that_was_never_used_has_no_thread():
    before = threading.active_count()
    with Client("127.0.0.1:1"):
        assert threading.active_count() == before


def test_dropping_a_client_ends_its_thread():
    with FakeServer(say("hi")) as server:
        client = Client(server.target)
        client.generate("?")
        del client
        assert not any(thread.name == "paceline-client" for thread in threading.enumerate())


def test_closing_from_another_thread_wakes_who_waits():
    with FakeServer([Hold()]) as server:
        client = Client(server.target)
        errors = []

        def wait():
            try:
                client.generate("?")
            except PacelineError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        server.wait_for(lambda seen: len(seen.requests) == 1)
        client.close()
        waiting.join(10)
    assert [type(error) for error in errors] == [ClientClosedError]


def test_closing_a_stream_from_another_thread_ends_the_iteration():
    with FakeServer([Tokens((1,), "a"), Hold()]) as server, Client(server.target) as client:
        stream, came = client.stream("?", request_id="r1"), []
        has_begun = threading.Event()

        def read():
            for delta in stream:
                came.append(delta.text)
                has_begun.set()

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        assert has_begun.wait(10)
        stream.close()
        reading.join(10)
        assert not reading.is_alive()
        server.wait_for(lambda seen: seen.cancelled == ["r1"])
        assert came == ["a"]
        with pytest.raises(RequestCancelledError):
            _ = stream.result


def test_threads_that_read_one_stream_share_its_deltas():
    with FakeServer(say("one two three four five six")) as server, Client(server.target) as client:
        stream, came = client.stream("?"), []
        readers = [threading.Thread(target=lambda: came.extend(delta.offset for delta in stream)) for _ in range(3)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(10)
        assert sorted(came) == [0, 1, 2, 3, 4, 5, 6]
        assert stream.result.text == "one two three four five six"
