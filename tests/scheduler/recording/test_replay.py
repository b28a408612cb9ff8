"""What was recorded of a core is done again by a fresh one, plan by plan; what is done otherwise is found."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.recorded import RecordedHarness, Recordings, record_seed
from paceline_scheduler.core import events
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning import growth
from paceline_scheduler.core.planning.growth import OutputLengths
from paceline_scheduler.errors import SchedulerError
from paceline_scheduler.recording.replay import Recording, replay
from paceline_scheduler.recording.wire import RecordedEvent, RecordedKeys, RecordedPlanning
from scheduler_rig.requests import make_request

FORMS = pytest.mark.parametrize("is_raw", [True, False], ids=["raw", "stand-ins"])
SMALL_FILE = 6_000


def differences(recordings):
    """What replaying each file finds."""
    return [done.difference for done in map(replay, recordings.read()) if done.difference is not None]


def serve(num_requests, *recordings):
    """Serve requests on two small executors with all that can happen to them; returns how often each did."""
    random, counts = Random(5), Counter()  # noqa: S311 - nothing secret
    executors = [make_executor(num_blocks=30, incarnation=number, end_probability=0.4) for number in (1, 2)]
    harness = RecordedHarness(recordings, *executors, limits=CoreLimits(max_num_queued_reqs=12))
    shared = [[random.randrange(1000) for _ in range(12)] for _ in range(4)]

    def take_over():
        harness.feed(events.BeginAnew("another scheduler has them", None, tuple(harness.executors)))
        for address in harness.executors:
            harness.attach(address)

    faults = {
        "takeover": lambda _: take_over(),
        "death": harness.die,
        "broken": lambda address: harness.break_stream(address, drops_plans=True),
    }
    requests = []
    for number in range(num_requests):
        prompt = random.choice(shared)[: random.randint(4, 12)] + [number % 997] * random.randint(1, 20)
        request = make_request(
            prompt,
            30,
            tenant=random.choice("ab"),
            is_resumable=number % 2 == 0,
            end_token_ids=(0,) if number % 4 else (),
        )
        requests.append(request)
        try:
            harness.submit(request)
        except SchedulerError as error:
            counts[type(error).__name__] += 1
        address = random.choice(list(harness.executors))
        if random.random() < 0.1:
            earlier = random.choice(requests[-12:])
            counts["cancels"] += tried(harness, events.Cancel(earlier.key))
        if random.random() < 0.1:
            harness.detach(random.choice(requests))
        if random.random() < 0.04:
            fault = random.choice(list(faults))
            counts[fault] += 1
            faults[fault](address)
        for _ in range(random.randint(0, 2)):
            harness.clock.advance(random.random() * 0.05)
            for each in harness.executors:
                plan = harness.step(each)
                if plan is not None:
                    counts["preemptions"] += sum(release.final is None for release in plan.releases)
    harness.finish()
    return counts


def tried(harness, event):
    """Whether it was not refused."""
    try:
        harness.feed(event)
    except SchedulerError:
        return False
    return True


@pytest.fixture
def expecting_short_outputs(monkeypatch):
    """A core that always expects short outputs admits more than the pool can hold; the one that repeats it too."""
    monkeypatch.setattr(OutputLengths, "observe", lambda lengths, _: None)
    monkeypatch.setattr(growth, "_FIRST_MEAN", 1.0)
    monkeypatch.setattr(growth, "_FIRST_DEVIATION", 1.0)


@pytest.mark.usefixtures("expecting_short_outputs")
@pytest.mark.parametrize(("num_requests", "num_faults"), [(160, 1), pytest.param(1000, 5, marks=pytest.mark.slow)])
def test_many_requests_with_faults_are_planned_again_bit_for_bit(num_requests, num_faults):
    """Executors die, streams break, another scheduler takes over, requests are cancelled, preempted and refused.

    With stand-ins every file is repeated alone: each begins with all that the core knows. Records that are made long
    after what they tell of, when everything has changed, are the same.
    """
    whole, late = Recordings(is_raw=True), Recordings(is_raw=True, num_waiting=1 << 30)
    in_parts = Recordings(is_raw=False, max_file_bytes=500 * num_requests, num_waiting=40)
    counts = serve(num_requests, whole, late, in_parts)
    happened = ("takeover", "death", "broken", "cancels", "preemptions", "QueueFullError")
    assert min(counts[what] for what in happened) >= num_faults, counts
    (recording,) = whole.read()
    done = replay(recording)
    assert done.difference is None
    assert done.num_plans > num_requests
    assert late.files() == whole.files()
    assert len(in_parts.files()) > 2
    assert differences(in_parts) == []


@FORMS
@settings(max_examples=settings.default.max_examples // 20, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    max_file_bytes=st.sampled_from([SMALL_FILE, 1 << 30]),
    num_waiting=st.sampled_from([0, 60]),
)
def test_every_scheduler_of_a_simulated_system_is_repeated(is_raw, seed, max_file_bytes, num_waiting):
    recordings = Recordings(is_raw=is_raw, max_file_bytes=max_file_bytes, num_waiting=num_waiting)
    record_seed(seed, recordings)
    assert recordings.files()
    assert differences(recordings) == []


@pytest.fixture(scope="module")
def recording():
    """A recording of some requests."""
    recordings = Recordings(is_raw=True)
    assert serve(100, recordings)["QueueFullError"]
    (made,) = recordings.read()
    return made


def test_a_core_that_decides_otherwise_is_found_with_the_first_step(recording):
    """Here one that takes fewer tokens into a step: the first plan that had more differs, if none before it does."""
    most = 40
    plans = [each for each in recording.records if isinstance(each, RecordedPlanning) and each.recorded is not None]
    larger = next(each for each in plans if each.recorded.plan.num_tokens > most)
    core = recording.fresh_core()
    core.state.limits = replace(core.state.limits, max_num_batched_tokens=most)
    found = replay(recording, core=core).difference
    assert found is not None
    assert (found.now, found.address, found.step_id) == (larger.now, larger.address, larger.recorded.plan.step_id)
    assert any(sentence.startswith("num_scheduled_tokens: then") for sentence in found.sentences)


@pytest.mark.parametrize("refusal", ["", "DrainingError"])
def test_an_event_that_the_core_refuses_now_is_a_difference(recording, refusal):
    records = list(recording.records)
    refused = [isinstance(each, RecordedEvent) and each.refusal == "QueueFullError" for each in records]
    index = refused.index(True)
    records[index] = replace(records[index], refusal=refusal)
    found = replay(Recording(recording.header, tuple(records))).difference
    assert found is not None
    assert found.now == records[index].now
    assert found.sentences[0].startswith("Submit, which was")


def served_twice():
    """The second scheduler's recording, with stand-ins, of two that served the same prompt one after the other."""
    recordings = Recordings(is_raw=False)
    harness = RecordedHarness([recordings], make_executor())
    for _ in range(2):
        harness.submit(make_request(range(17), 9, seed=1))
        harness.finish()
        harness.succeed()
    return list(recordings.read())[1]


def test_cached_blocks_of_a_former_scheduler_are_found_by_stand_ins_too():
    """Their keys are of tokens that nobody wrote down: what is hit is paired with the keys of stand-ins."""
    recording = served_twice()
    assert replay(recording).difference is None


def test_without_these_pairs_the_hit_would_be_missed():
    recording = served_twice()
    bare = tuple(each for each in recording.records if not isinstance(each, RecordedKeys))
    assert len(bare) < len(recording.records)
    found = replay(Recording(recording.header, bare)).difference
    assert found is not None
    assert any(sentence.startswith("shared: then") for sentence in found.sentences)


@pytest.mark.parametrize("holds_tokens", [True, False])
def test_a_client_that_comes_back_is_found_again_by_the_hash_of_its_stand_ins(holds_tokens):
    recordings = Recordings(is_raw=False)
    harness = RecordedHarness([recordings], make_executor())
    request = make_request(9, 12, is_resumable=True)
    harness.submit(request)
    harness.steps(6)
    harness.detach(request)
    again = replace(request, attachment=2, prompt_token_ids=request.prompt_token_ids + 1)
    harness.resume(again, holds_tokens=holds_tokens)
    harness.finish()
    assert len(harness.client.token_ids[request.handle]) == 12
    assert differences(recordings) == []
