"""An inbox takes exactly the output that was sent, in any grouping, and refuses everything else, which a hash tells."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_client.errors import ConnectionLostError, SlowConsumerError, StreamCorruptedError
from paceline_client.hashing import rolling_hash
from paceline_client.inbox import Inbox, Interrupted
from paceline_client.results import Delta, FinishReason, Result, TokenLogprobs, Usage
from paceline_client.wire import ReceivedDelta, ReceivedFinish

FINISH = ReceivedFinish(FinishReason.STOP, None, Usage(3, 0, 5))


def received(ids, offset, before, finish=None, index=0):
    """A delta of these ids at an offset, hashed after the output `before`."""
    reason = finish.reason if finish else None
    delta = Delta("".join(f"<{i}>" for i in ids), tuple(ids), offset, 1, (), reason, index)
    return ReceivedDelta("r", delta, rolling_hash([*before, *ids]), finish)


def deltas_of(groups, finish=FINISH):
    """True deltas that carry these groups of tokens, the last with the finish."""
    output = []
    for number, group in enumerate(groups):
        yield received(group, len(output), output, finish if number == len(groups) - 1 else None)
        output += group


async def drain(inbox):
    """Read to the end: the tokens of all deltas, and the result."""
    ids = []
    while isinstance(item := await inbox.get(), Delta):
        ids += item.token_ids
    return ids, item


groups_of_tokens = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=2, max_size=8)


@given(groups_of_tokens)
def test_grouping_does_not_matter(groups):
    inbox = Inbox("r", max_buffered_tokens=100)
    for delta in deltas_of(groups):
        inbox.accept(delta)
    ids, result = asyncio.run(drain(inbox))
    expected = [i for group in groups for i in group]
    assert ids == expected
    assert result.token_ids == tuple(expected)
    assert result.text == "".join(f"<{i}>" for i in expected)


async def test_it_is_empty_when_a_reader_would_wait():
    """What is unread fills it, and so does its end, for ever."""
    inbox = Inbox("r", max_buffered_tokens=100)
    first, last = deltas_of([[1], [2]])
    assert inbox.is_empty
    inbox.accept(first)
    assert not inbox.is_empty
    await inbox.get()
    assert inbox.is_empty
    inbox.accept(last)
    await drain(inbox)
    assert not inbox.is_empty


@given(groups_of_tokens, st.data())
def test_a_lost_doubled_swapped_or_changed_delta_is_refused(groups, data):
    """What was delivered before the fault is a prefix of the truth; the fault is an error, never a wrong token.

    Of a token that was changed the offset is right: only the hash tells.
    """
    deltas = list(deltas_of(groups))
    fault = data.draw(st.sampled_from(["lose", "double", "swap", "change"]))
    at = data.draw(st.integers(0, len(deltas) - 2))
    true, *rest = deltas[at].delta.token_ids
    other = data.draw(st.integers(0, 5).filter(lambda token_id: token_id != true))
    changed = deltas[at]._replace(delta=replace(deltas[at].delta, token_ids=(other, *rest)))
    faulty = {
        "lose": deltas[:at] + deltas[at + 1 :],
        "double": deltas[: at + 1] + deltas[at:],
        "swap": [*deltas[:at], deltas[at + 1], deltas[at], *deltas[at + 2 :]],
        "change": [*deltas[:at], changed, *deltas[at + 1 :]],
    }[fault]
    inbox = Inbox("r", max_buffered_tokens=100)
    for delta in faulty:
        if not inbox.has_ended:
            inbox.accept(delta)
    delivered = []

    async def read():
        while isinstance(delta := await inbox.get(), Delta):
            delivered.extend(delta.token_ids)

    with pytest.raises(StreamCorruptedError, match="rolling hash" if fault == "change" else "offset"):
        asyncio.run(read())
    expected = [i for group in groups for i in group]
    assert delivered == expected[: len(delivered)]


async def test_another_completion_is_refused():
    inbox = Inbox("r", max_buffered_tokens=100)
    inbox.accept(received([1], 0, [], index=1))
    with pytest.raises(StreamCorruptedError, match="completion 1"):
        await inbox.get()


async def test_the_result_waits_for_the_last_completion():
    inbox = Inbox("r", max_buffered_tokens=100, num_completions=2)
    for delta in (received([5], 0, [], index=1), received([6], 1, [5], FINISH, index=1), received([7], 0, [])):
        inbox.accept(delta)
    assert not inbox.has_ended
    inbox.accept(received([8], 1, [7], FINISH))
    ids, result = await drain(inbox)
    assert ids == [5, 6, 7, 8]
    assert [(c.index, c.token_ids) for c in result.completions] == [(0, (7, 8)), (1, (5, 6))]
    assert (result.token_ids, result.usage) == ((7, 8), FINISH.usage)


async def test_nothing_may_follow_the_end_of_a_completion():
    inbox = Inbox("r", max_buffered_tokens=100, num_completions=2)
    inbox.accept(received([1], 0, [], FINISH))
    inbox.accept(received([2], 1, [1]))
    with pytest.raises(StreamCorruptedError, match="completion 0 has ended"):
        await drain(inbox)


async def test_a_reader_that_does_not_read_gets_what_fits_and_then_an_error():
    inbox = Inbox("r", max_buffered_tokens=3)
    for delta in deltas_of([[1, 2], [3], [4], [5]]):
        if not inbox.has_ended:
            inbox.accept(delta)
    assert (await inbox.get()).token_ids == (1, 2)
    assert (await inbox.get()).token_ids == (3,)
    with pytest.raises(SlowConsumerError, match="3 tokens were left unread"):
        await inbox.get()


async def test_a_reader_that_keeps_up_may_read_more_than_the_buffer():
    inbox = Inbox("r", max_buffered_tokens=1)
    for delta in deltas_of([[1], [2], [3]]):
        inbox.accept(delta)
        await inbox.get()
    assert isinstance(await inbox.get(), Result)


async def test_one_delta_is_taken_whatever_its_size():
    inbox = Inbox("r", max_buffered_tokens=2)
    inbox.accept(received([1, 2, 3, 4], 0, []))
    assert (await inbox.get()).token_ids == (1, 2, 3, 4)


async def test_completions_share_no_buffer():
    inbox = Inbox("r", max_buffered_tokens=3, num_completions=4)
    for index in range(4):
        inbox.accept(received([1, 2, 3, 4], 0, [], index=index))
    assert not inbox.has_ended
    inbox.accept(received([5], 4, [1, 2, 3, 4], index=2))
    with pytest.raises(SlowConsumerError, match="4 tokens were left unread"):
        await drain(inbox)


@pytest.mark.parametrize("befalls", [Inbox.fail, Inbox.interrupt])
async def test_the_first_end_stays(befalls):
    """A finished request does not fail because its connection broke afterwards, nor does it come back."""
    inbox = Inbox("r", max_buffered_tokens=10)
    inbox.accept(received([1], 0, [], FINISH))
    befalls(inbox, ConnectionLostError("later"))
    assert inbox.interruption is None
    ids, result = await drain(inbox)
    assert (ids, result.token_ids) == ([1], (1,))


async def test_an_interruption_is_read_after_what_came_before_it():
    inbox = Inbox("r", max_buffered_tokens=10, num_completions=2)
    for delta in (received([1], 0, []), received([5], 0, [], FINISH, index=1)):
        inbox.accept(delta)
    inbox.interrupt(ConnectionLostError("gone"))
    assert [(await inbox.get()).index, (await inbox.get()).index] == [0, 1]
    for _ in range(2):
        with pytest.raises(Interrupted) as caught:
            await inbox.get()
        assert caught.value.error is inbox.interruption
    assert [(held.index, held.token_ids, held.last_attempt) for held in inbox.held()] == [(0, (1,), 1), (1, (5,), 1)]
    assert [held.is_finished for held in inbox.held()] == [False, True]
    inbox.go_on()
    assert inbox.is_empty
    for delta in (received([7, 7], 0, [], FINISH, index=1), received([2], 1, [1], FINISH)):
        inbox.accept(delta)
    ids, result = await drain(inbox)
    assert (ids, [completion.token_ids for completion in result.completions]) == ([2], [(1, 2), (5,)])


async def test_the_prompt_is_judged_once():
    told = (TokenLogprobs(0, -0.5, ()),)

    def first(delta):
        return delta._replace(delta=replace(delta.delta, prompt_logprobs=told))

    inbox = Inbox("r", max_buffered_tokens=10)
    inbox.accept(first(received([1], 0, [])))
    inbox.interrupt(ConnectionLostError("gone"))
    assert (await inbox.get()).prompt_logprobs == told
    inbox.go_on()
    inbox.accept(first(received([2], 1, [1], FINISH)))
    assert (await inbox.get()).prompt_logprobs == ()
    assert (await inbox.get()).prompt_logprobs == told


async def test_a_waiting_reader_wakes_up():
    inbox = Inbox("r", max_buffered_tokens=10)
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.accept(received([7], 0, []))
    assert (await waiting).token_ids == (7,)
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.interrupt(ConnectionLostError("away"))
    with pytest.raises(Interrupted, match="away"):
        await waiting
    inbox.go_on()
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.fail(ConnectionLostError("gone"))
    with pytest.raises(ConnectionLostError, match="gone"):
        await waiting
