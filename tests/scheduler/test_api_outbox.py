"""The outbox of a stream: output gathered while the stream is busy, bounded, in order."""

import asyncio

import pytest

from paceline_scheduler.api.outbox import DrainNotice, Outbox, PendingDelta

MEBIBYTE = 1024 * 1024


def put(outbox, handle, offset, token_ids, text):
    """Put in output of a request; tells whether it may wait."""
    return outbox.put(handle, PendingDelta(f"r{handle}", offset, 1, offset, token_ids, text))


def shape(parcel):
    """What a parcel holds, without the details."""
    deltas = [(delta.request_id, delta.offset, delta.token_ids, delta.text) for delta in parcel.deltas]
    return deltas, [failure.request_id for failure in parcel.failures]


def test_output_of_a_request_is_joined_until_it_is_collected():
    """One delta per request, from the first offset to the last hash."""
    outbox = Outbox(MEBIBYTE, 0)
    put(outbox, 1, 0, [5], "a")
    put(outbox, 2, 7, [6], "x")
    put(outbox, 1, 1, [7, 8], "b")
    parcel = outbox.collect(MEBIBYTE)
    assert shape(parcel) == ([("r1", 0, [5, 7, 8], "ab"), ("r2", 7, [6], "x")], [])
    assert parcel.deltas[0].rolling_hash == 1
    assert outbox.collect(MEBIBYTE).is_empty


def test_a_full_outbox_says_so_and_has_room_again_when_it_was_emptied():
    """Bytes are counted for tokens, text and log-probabilities."""
    outbox = Outbox(1000, 0)
    assert put(outbox, 1, 0, [1] * 100, "x" * 300)
    assert not put(outbox, 1, 100, [1] * 100, "x")
    outbox.drop(1)
    assert put(outbox, 2, 0, [1] * 100, "x" * 300)
    outbox.collect(MEBIBYTE)
    assert put(outbox, 2, 100, [1] * 100, "☃" * 75)
    assert not put(outbox, 2, 200, [1], "☃" * 50)


def test_a_session_has_more_room_the_more_requests_it_runs():
    """One step brings output for all of them."""
    outbox = Outbox(0, 512)
    outbox.num_open = 100
    assert all(put(outbox, handle, 0, [1], " word") for handle in range(100))


def test_what_exceeds_a_message_goes_into_the_next_one_and_errors_stay_behind_output():
    """Whole deltas; a failure never overtakes the output of its request."""
    outbox = Outbox(MEBIBYTE, 0)
    for handle in range(3):
        put(outbox, handle, 0, [1], "x" * 600)
    outbox.fail("r1", ValueError())
    parcels = [outbox.collect(1000) for _ in range(3)]
    assert [[delta.request_id for delta in parcel.deltas] for parcel in parcels] == [["r0", "r1"], ["r2"], []]
    assert [[failure.request_id for failure in parcel.failures] for parcel in parcels] == [[], ["r1"], []]


async def test_waiting_ends_with_each_kind_of_message():
    """Output when the step is over, failures, heartbeats and a drain at once."""
    outbox = Outbox(MEBIBYTE, 0)
    waiting = asyncio.create_task(outbox.wait())
    put(outbox, 1, 0, [1], "x")
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.wake()
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


async def test_a_client_that_does_not_read_its_refusals_is_not_read_either():
    """Until it reads."""
    outbox = Outbox(1000, 0)
    await outbox.wait_for_room()
    for number in range(3):
        outbox.fail(f"r{number}", ValueError())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await outbox.wait_for_room()
    outbox.collect(MEBIBYTE)
    await outbox.wait_for_room()
