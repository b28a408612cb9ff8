"""The outbox of a stream: output gathered while the stream is busy, bounded, in order."""

import asyncio

import pytest

from paceline.plan.values import TokenLogprobs
from paceline_scheduler.api.outbox import DrainNotice, Outbox, PendingDelta

MEBIBYTE = 1024 * 1024


def put(outbox, handle, offset, token_ids, text, at_least=0):
    """Put in output of a request."""
    outbox.put(handle, PendingDelta(f"r{handle}", offset, 1, offset, token_ids, text), at_least)


def step(outbox, *deltas):
    """Put in what a step brings, by handle and text; tells whether the client is slow."""
    for handle, text in deltas:
        put(outbox, handle, 0, [], text)
    outbox.end_step()
    return outbox.is_over


def shape(content):
    """What a message holds, without the details."""
    deltas = [(delta.request_id, delta.offset, delta.token_ids, delta.text) for delta in content.deltas]
    return deltas, [failure.request_id for failure in content.failures]


async def must_wait(outbox):
    """Whether requests of its client wait."""
    try:
        async with asyncio.timeout(0.01):
            await outbox.wait_for_room()
    except TimeoutError:
        return True
    return False


def test_output_of_a_request_is_joined_until_it_is_collected():
    outbox = Outbox(MEBIBYTE, 0)
    put(outbox, 1, 0, [5], "a")
    put(outbox, 2, 7, [6], "x")
    put(outbox, 1, 1, [7, 8], "b")
    content = outbox.collect(MEBIBYTE)
    assert shape(content) == ([("r1", 0, [5, 7, 8], "ab"), ("r2", 7, [6], "x")], [])
    assert content.deltas[0].rolling_hash == 1
    assert outbox.collect(MEBIBYTE).is_empty


def test_a_client_that_reads_nothing_is_slow_and_no_longer_when_something_was_dropped():
    outbox = Outbox(1000, 0)
    assert [step(outbox, (handle, "x" * 352)) for handle in (1, 2, 2, 3)] == [False, False, False, True]
    outbox.drop(2)
    assert not outbox.is_over


@pytest.mark.parametrize(("text", "num_bytes"), [("x" * 300, 300), ("☃" * 75, 300)], ids=["ascii", "wide"])
def test_bytes_are_those_of_tokens_text_and_log_probabilities(text, num_bytes):
    outbox = Outbox(1000, 0)
    logprobs = tuple(TokenLogprobs(7, -1.0, ((7, -1.0), (8, -2.0))) for _ in range(2))
    for offset in (0, 2):
        outbox.put(1, PendingDelta("r", offset, 1, 0, [7, 8], text, logprobs))
    outbox.put(2, PendingDelta("r", 5, 1, 0, [7], ""), at_least=2)
    first = 48 + 2 * (2 * 5 + num_bytes + 2 * 3 * 16)
    assert (outbox.num_bytes, outbox.num_bytes_of(1), outbox.num_bytes_of(2)) == (first + 53, first, 53)
    outbox.drop(1)
    outbox.drop(2)
    assert outbox.num_bytes == 0


async def test_a_message_that_is_being_sent_takes_room_until_it_is_gone():
    outbox = Outbox(1000, 0)
    step(outbox, (1, "x" * 952))
    outbox.collect(MEBIBYTE)
    assert not step(outbox, (1, "x" * 900))
    assert step(outbox, (1, "x" * 200))
    await outbox.wait()
    assert not outbox.is_over


def test_one_step_is_taken_whatever_its_size_and_what_comes_behind_it_has_the_usual_room():
    """A client cannot have read what was not there; one that leaves it unread is slow by what follows."""
    outbox = Outbox(1000, 0)
    assert not step(outbox, (1, "x" * 5000), (2, "x" * 5000))
    outbox.collect(0)
    assert not step(outbox, (1, "y"))
    assert [step(outbox, (2, "y" * 400)) for _ in range(3)] == [False, False, True]


async def test_a_step_that_was_read_leaves_no_room_behind():
    outbox = Outbox(1000, 0)
    step(outbox, (1, "x" * 5000))
    outbox.collect(MEBIBYTE)
    outbox.beat()
    await outbox.wait()
    assert [step(outbox, (1, "y" * 400)) for _ in range(4)] == [False, False, False, True]


def test_a_session_has_more_room_the_more_requests_it_runs():
    outbox = Outbox(0, 512)
    outbox.num_open = 100
    assert not any(step(outbox, *((handle, "x" * 150) for handle in range(100))) for _ in range(4))
    assert step(outbox, *((handle, "x" * 150) for handle in range(100)))


def test_what_is_held_is_ready_when_there_is_enough_of_it():
    outbox = Outbox(60_000, 0)
    put(outbox, 1, 1, [1], "a", at_least=2)
    put(outbox, 2, 1, [1], "x" * 10_000, at_least=9)
    put(outbox, 3, 1, [1], "b", at_least=9)
    assert outbox.collect(MEBIBYTE).is_empty
    put(outbox, 1, 2, [2], "a", at_least=2)
    put(outbox, 2, 2, [2], "x" * 10_000, at_least=9)
    outbox.release(3)
    assert [delta.request_id for delta in outbox.collect(MEBIBYTE).deltas] == ["r1", "r2", "r3"]
    for handle in range(4, 10):
        put(outbox, handle, 1, [1], "x" * 10_000, at_least=9)
    outbox.end_step()
    assert len(outbox.collect(MEBIBYTE).deltas) == 6
    assert not outbox.is_over


def test_what_exceeds_a_message_goes_into_the_next_one_and_errors_stay_behind_output():
    """Whole deltas, one at least; a failure never overtakes the output of its request."""
    outbox = Outbox(MEBIBYTE, 0)
    for handle, size in enumerate((400, 400, 400, 2000)):
        put(outbox, handle, 0, [1], "x" * size)
    outbox.fail("r1", ValueError())
    contents = [outbox.collect(1000) for _ in range(4)]
    assert [[delta.request_id for delta in content.deltas] for content in contents] == [
        ["r0", "r1"],
        ["r2"],
        ["r3"],
        [],
    ]
    assert [[failure.request_id for failure in content.failures] for content in contents] == [[], [], [], ["r1"]]
    assert outbox.is_empty


async def test_waiting_ends_with_each_kind_of_message():
    outbox = Outbox(MEBIBYTE, 0)
    waiting = asyncio.create_task(outbox.wait())
    put(outbox, 1, 0, [1], "x")
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.end_step()
    await waiting
    outbox.collect(MEBIBYTE)

    for put_in in (
        lambda: outbox.fail("r1", ValueError()),
        outbox.beat,
        lambda: outbox.announce_drain(DrainNotice("bye", 1.0)),
    ):
        put_in()
        async with asyncio.timeout(5):
            await outbox.wait()
        assert not outbox.collect(MEBIBYTE).is_empty
    assert outbox.is_draining


@pytest.mark.parametrize("kind", ["refusals", "output"])
async def test_a_client_that_does_not_read_is_not_read_either(kind):
    outbox = Outbox(1000, 0)
    assert not await must_wait(outbox)
    if kind == "refusals":
        for number in range(3):
            outbox.fail(f"r{number}", ValueError())
    else:
        step(outbox, (1, "x" * 1000))
    assert await must_wait(outbox)
    outbox.collect(MEBIBYTE)
    assert await must_wait(outbox)
    outbox.beat()
    await outbox.wait()
    assert not await must_wait(outbox)
