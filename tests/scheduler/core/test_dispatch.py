"""Whom a waiting request is meant for: the choice itself, and for how long many executors keep to it."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import RecordId
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import StreamEnded
from paceline_scheduler.core.executor import group
from paceline_scheduler.core.live import MAX_LEFT_S
from paceline_scheduler.core.planning.capacity import Blocker, Capacity, Fit
from paceline_scheduler.core.planning.dispatch import MAX_ASKED_ANEW
from paceline_scheduler.core.planning.forecast import prefill_rate
from paceline_scheduler.core.planning.step_time import num_chunk_pairs
from paceline_scheduler.core.tables.rows import RUNNING
from paceline_scheduler.recording.graph import read_value, write_value
from scheduler_rig.requests import make_request


class Oracle:
    """The rule in its plainest form: whoever plans asks everybody for every request, and keeps nothing."""

    def __init__(self, address, views, limits, now, _):
        self.meant = {}
        self.address, self.limits, self.now = address, limits, now
        self.views = {view.description.address: view for view in views()}
        self.rooms = {each: Capacity(view, limits) for each, view in self.views.items()}
        self.num_meant = dict.fromkeys(self.views, 0)

    def is_for_others(self, live):
        is_late = live.left is not None and self.now - live.left.since_s > MAX_LEFT_S
        if is_late or len(self.views) < 2:
            return False
        fits = {address: room.fit(live) for address, room in self.rooms.items()}
        if any(isinstance(fit, Blocker) and fit.is_brief for fit in fits.values()):
            return True
        found = {address: fit for address, fit in fits.items() if isinstance(fit, Fit)}
        if not found:
            return False
        best = min(found, key=lambda address: (self.cost_s(address, live.num_known_tokens, found[address]), address))
        self.rooms[best].take(live, found[best])
        self.num_meant[best] += live.num_known_tokens - found[best].blocks.num_cached_tokens
        return best != self.address

    def cost_s(self, address, num_known, fit):
        """When a request would have its 32nd token there."""
        view = self.views[address]
        predict_ns, running = view.step_time.predict_ns, view.rows.state == RUNNING
        scheduled = view.rows.num_scheduled[running]
        rate = prefill_rate(view, self.limits, len(scheduled), int(scheduled.sum()))
        num_behind = sum(max(0, int(target)) for target in view.rows.target[running] - scheduled)
        num_tokens = max(1, num_known - fit.blocks.num_cached_tokens)
        alone_ns = predict_ns(num_tokens, num_chunk_pairs(fit.blocks.num_cached_tokens, num_tokens))
        attention_ns = alone_ns - predict_ns(num_tokens, 0)
        prefill_s = max(num_tokens / rate + attention_ns / 1e9, alone_ns / 1e9)
        num_running = self.rooms[address].num_running + 1
        token_s = predict_ns(num_running, num_running * num_known) / 1e9 / view.speculation.speedup
        return num_behind / rate + self.num_meant[address] / rate + prefill_s + 32 * token_s


def some_executor(random, number):
    return make_executor(
        num_blocks=random.randint(24, 96),
        max_num_rows=random.randint(2, 8),
        max_num_batched_tokens=random.choice((32, 256)),
        end_probability=0.05,
        incarnation=100 * number + 1,
    )


def some_requests(random, handle):
    """Return one, or two completions of one; prompts share beginnings."""
    prompt = [random.choice((3, 5))] * random.choice((0, 8, 24)) + [handle % 90] * random.randint(1, 40)
    request = make_request(prompt, random.randint(1, 30), handle=handle, priority=random.choice((0, 0, 1)))
    if random.random() < 0.8:
        return [request]
    keys = [RecordId("", f"both-{handle}", index) for index in range(2)]
    return [replace(request, handle=handle + index, key=key, num_completions=2) for index, key in enumerate(keys)]


def placements(seed, num_executors):
    """Let chance load some executors; returns what each plan placed where."""
    random = Random(seed)  # noqa: S311  repeatable
    harness = CoreHarness(*(some_executor(random, number) for number in range(num_executors)))
    for address in harness.executors:
        base_ns, token_ns = random.choice((1e6, 4e6)), random.choice((5e4, 1e6, 1e6))
        harness.views.executor(address).step_time._weights = [base_ns, 64 * token_ns, random.choice((0.0, 1e6))]
    placed, requests = [], []
    for _ in range(40):
        for _ in range(random.choice((0, 0, 1, 6))):
            fresh = some_requests(random, len(requests) + 1)
            requests += fresh
            harness.submit(*fresh)
        if requests and random.random() < 0.2:
            harness.detach(random.choice(requests))
        for address in random.sample(sorted(harness.executors), random.randint(1, num_executors)):
            plan = harness.step(address) if random.random() < 0.8 else harness.plan(address)
            placed.append((address, [] if plan is None else [each.request.handle for each in plan.new_requests]))
        harness.clock.advance(random.choice((0.001, 0.01, 0.2)))
    return placed


@settings(max_examples=settings.default.max_examples // 2)
@given(seed=st.integers(0, 1 << 32), num_executors=st.integers(1, MAX_ASKED_ANEW))
def test_few_executors_choose_as_if_each_asked_all_for_every_request(seed, num_executors):
    chosen = placements(seed, num_executors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "Dispatch", Oracle)
        assert placements(seed, num_executors) == chosen


# Many executors


MANY = [f"executor-{number}" for number in range(MAX_ASKED_ANEW + 2)]
ASKING, *_, CHOSEN = MANY


def many():
    """Return executors of which the last one is the largest."""
    sizes = [64 if address == CHOSEN else 24 for address in MANY]
    return CoreHarness(*(make_executor(num_blocks=size, incarnation=100 * n + 1) for n, size in enumerate(sizes)))


def set_base_ms(harness, address, base_ms):
    harness.views.executor(address).step_time._weights = [base_ms * 1e6, 64e6, 0.0]


def placed_by(harness, *addresses):
    """Let each plan a step; returns {handle: address}."""
    plans = [(address, harness.step(address)) for address in addresses]
    return {each.request.handle: address for address, plan in plans if plan for each in plan.new_requests}


def with_one_meant(num_prompt=3):
    """Let a request be left to an executor from which on all others would be better."""
    harness = many()
    for address in MANY:
        set_base_ms(harness, address, 1.0 if address == CHOSEN else 2.0)
    harness.submit(make_request(num_prompt, 9, handle=1))
    assert placed_by(harness, ASKING) == {}
    set_base_ms(harness, CHOSEN, 3.0)
    return harness


@pytest.mark.parametrize("is_restored", [False, True], ids=["", "restored"])
@pytest.mark.parametrize(
    ("happens", "taken_by"),
    [
        (lambda _: None, CHOSEN),
        (lambda harness: harness.clock.advance(MAX_LEFT_S), CHOSEN),
        (lambda harness: harness.clock.advance(MAX_LEFT_S + 0.01), ASKING),
        (lambda harness: harness.drain(CHOSEN), ASKING),
        (lambda harness: harness.feed(StreamEnded(CHOSEN)), ASKING),
        (lambda harness: harness.lose(CHOSEN), ASKING),
    ],
    ids=["nothing", "less than half a second", "half a second", "it drains", "it is suspected", "it is lost"],
)
def test_many_executors_leave_a_request_to_the_one_it_was_meant_for_until(happens, taken_by, is_restored):
    """Also after what is known was written down and read again."""
    harness = with_one_meant()
    if is_restored:
        harness.core = Core.of(read_value(*write_value(harness.core.state, {})))
    happens(harness)
    assert placed_by(harness, ASKING, CHOSEN) == {1: taken_by}


def test_whoever_planned_without_taking_what_was_meant_for_it_is_not_waited_for():
    """A more urgent request, which nobody else could hold, took its blocks."""
    harness = with_one_meant(60)
    harness.submit(make_request(200, 9, handle=2, priority=-9))
    assert placed_by(harness, CHOSEN, ASKING) == {2: CHOSEN, 1: ASKING}


def test_many_executors_share_a_burst_and_choose_once_for_each_request(monkeypatch):
    harness, asked = many(), []
    ask = group.Dispatch.is_for_others
    monkeypatch.setattr(group.Dispatch, "is_for_others", lambda self, live: asked.append(live) or ask(self, live))
    harness.submit(*(make_request(3, 9) for _ in range(2 * len(MANY))))
    placed = placed_by(harness, *MANY)
    assert sorted(placed.values()) == sorted(2 * MANY)
    assert len(asked) == len(placed)


def test_what_is_lost_on_the_way_to_many_executors_is_placed_by_their_next_scheduler():
    harness = with_one_meant()
    request = harness.views.waiting_requests()[0].request
    harness.succeed()
    harness.submit(request)
    assert placed_by(harness, *MANY) == {1: ASKING}
