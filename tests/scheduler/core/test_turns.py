"""In which order requests of several tenants leave the queue, and what each is told of those ahead of it."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness, running
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest, queue_key_of
from paceline_scheduler.core.phases import PhaseClock
from paceline_scheduler.core.queue.waiting import WaitingQueue
from paceline_scheduler.errors import QueueFullError
from scheduler_rig.requests import make_request

TENANTS = "abc"


def waiting_beside(held):
    """Return an empty queue of executors that hold so many rows of each tenant."""
    executors = [
        SimpleNamespace(
            description=SimpleNamespace(model=model),
            ledger=SimpleNamespace(rows=SimpleNamespace(num_of_tenant=rows)),
        )
        for model, rows in (("simulated", held), ("simulated", {"a": 1}), ("another", {"b": 9}))
    ]
    return WaitingQueue(executors)


@st.composite
def requests(draw):
    columns = st.tuples(st.sampled_from(TENANTS), st.integers(-1, 1), st.integers(0, 90), st.integers(1, 9))
    lives = []
    for number, (tenant, priority, submitted_s, size) in enumerate(draw(st.lists(columns, min_size=1, max_size=14))):
        request = make_request(size, size, handle=number, tenant=tenant, priority=priority)
        key = queue_key_of(request, number, float(submitted_s))
        lives.append(LiveRequest(request, key, PhaseClock.begin(float(submitted_s))))
    return lives


def in_turn(lives, held):
    """By hand: within a priority by rows held and own requests ahead, in the places of the priority by urgency."""
    places = sorted(lives, key=lambda live: live.queue_key)
    turns = {}
    for live in places:
        own = [other for other in places if (other.request.key.tenant, other.request.priority) == of(live)]
        turns[live.request.handle] = held.get(live.request.key.tenant, 0) + own.index(live), live.queue_key
    by_turn = sorted(lives, key=lambda live: turns[live.request.handle])
    queues = {priority: [live for live in by_turn if live.request.priority == priority] for priority in (-1, 0, 1)}
    return [queues[live.request.priority].pop(0) for live in places]


def of(live):
    return live.request.key.tenant, live.request.priority


@given(lives=requests(), held=st.dictionaries(st.sampled_from(TENANTS), st.integers(0, 3)))
def test_tenants_take_turns_within_a_priority(lives, held):
    waiting = waiting_beside(held)
    for live in lives:
        waiting.add(live)
    expected = in_turn(lives, held | {"a": held.get("a", 0) + 1})
    assert [*waiting.of_model("simulated")] == expected
    for number, live in enumerate(expected):
        assert waiting.position(live) == number
        ahead = waiting.ahead_of(live)
        assert ahead.num_tokens == sum(other.num_own_tokens for other in expected[:number])
        assert ahead.max_output_tokens == sum(other.request.max_tokens for other in expected[:number])


@given(lives=requests(), held=st.dictionaries(st.sampled_from(TENANTS), st.integers(0, 3)))
def test_a_newcomer_is_told_of_those_that_will_be_ahead_of_it(lives, held):
    *others, newcomer = lives
    waiting = waiting_beside(held)
    for live in others:
        waiting.add(live)
    told = waiting.ahead_of(newcomer)
    waiting.add(newcomer)
    assert told == waiting.ahead_of(newcomer)
    for live in lives:
        waiting.remove(live)
    assert waiting.num_requests == waiting.num_tokens == len(waiting.all()) == 0


def test_who_holds_the_fewest_rows_comes_next():
    harness = running(*(make_request(2, 9, tenant="flood") for _ in range(3)), on=make_executor(max_num_rows=3))
    harness.submit(*(make_request(2, 2, tenant="flood") for _ in range(5)))
    harness.submit(*(make_request(2, 2, tenant="polite") for _ in range(2)))
    order = [live.request.key.tenant for live in harness.views.waiting_requests()]
    assert order == ["polite", "polite", *["flood"] * 5]


@pytest.mark.parametrize(
    "bound", [{"max_num_queued_reqs": 4}, {"max_num_queued_tokens": 8}], ids=["requests", "tokens"]
)
def test_a_full_queue_takes_each_tenant_up_to_an_equal_part(bound):
    harness = CoreHarness(make_executor(), limits=CoreLimits(**bound))
    harness.submit(*(make_request(2, 1, tenant="flood") for _ in range(4)))
    harness.submit(*(make_request(2, 1, tenant="polite") for _ in range(2)))
    harness.submit(make_request(2, 1, tenant="another"))
    for tenant in ("flood", "polite", "another"):
        with pytest.raises(QueueFullError):
            harness.submit(make_request(2, 1, tenant=tenant))
