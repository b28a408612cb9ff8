"""What other settings would have done: the simulation is like the recording where it can be compared, and says so."""

import heapq
import json
from itertools import count
from random import Random

import numpy as np
import pytest

from both_sides.audited import make_executor
from both_sides.recorded import RecordedHarness, Recordings
from paceline_scheduler.core.events import StepFinished, Submit, Tick
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.errors import RecordingError
from paceline_scheduler.recording.learned import Learned
from paceline_scheduler.recording.replay import replay
from paceline_scheduler.recording.simulation import simulate
from paceline_scheduler.recording.tally import Tally
from paceline_scheduler.recording.what_if import compare, read_policy
from scheduler_rig.requests import make_request

BASE_S, TOKEN_S = 0.004, 0.0002
NUM_REQUESTS = 60


def serve_in_virtual_time(recordings, num_requests=NUM_REQUESTS):
    """Serve requests that come at random times, on an executor whose steps take a time by their tokens, and a bit."""
    random, numbers = Random(3), count()  # noqa: S311 - nothing secret
    harness = RecordedHarness([recordings], make_executor(num_blocks=512, max_num_rows=16))
    coming, free_s = [], 0.0
    for number in range(num_requests):
        request = make_request(random.randint(5, 120), random.randint(2, 40), request_id=f"request-{number}")
        heapq.heappush(coming, (random.random() * num_requests / 30, next(numbers), Submit((request,))))
    while coming:
        at_s, _, event = heapq.heappop(coming)
        harness.clock.advance(at_s - harness.clock())
        harness.feed(event)
        if not isinstance(event, StepFinished):
            harness.feed(Tick())
        while (plan := harness.core.plan("executor-0", harness.clock())) is not None:
            harness.executors["executor-0"].receive(plan)
            result = harness.executors["executor-0"].run_next()
            step_s = (BASE_S + TOKEN_S * plan.num_tokens) * random.uniform(0.9, 1.3)
            free_s = max(free_s, harness.clock()) + step_s
            timings = type(result.timings)(forward_ns=round(step_s * 1e9))
            heapq.heappush(coming, (free_s, next(numbers), StepFinished("executor-0", timed(result, timings))))


def timed(result, timings):
    """A result that says how long its step took."""
    values = {name: getattr(result, name) for name in result.__slots__}
    return type(result)(**{**values, "timings": timings})


@pytest.fixture(scope="module")
def recordings():
    """A recording with times."""
    made = Recordings(is_raw=False)
    serve_in_virtual_time(made)
    return made


def learned_from(recordings):
    """The recording, what was measured of it and what was learned."""
    (recording,) = recordings.read()
    tally, learned = Tally(), Learned()
    assert replay(recording, [tally, learned]).difference is None
    return recording, tally, learned


def test_step_times_are_learned(recordings):
    _, _, learned = learned_from(recordings)
    whole_s, busy_s = learned.step_costs().seconds(20, 20 * 60, 0)
    assert whole_s == pytest.approx(1.1 * (BASE_S + 20 * TOKEN_S), rel=0.1)
    assert busy_s == pytest.approx(whole_s, rel=0.1)


def test_with_the_same_settings_the_simulation_is_like_the_recording(recordings):
    """First tokens and the times between them, and every output as long as it was."""
    recording, recorded, learned = learned_from(recordings)
    again = Tally()
    assert simulate(recording, learned, recording.fresh_core().state.limits, again)
    assert again.num_tokens == recorded.num_tokens
    assert len(again.whole_s) == len(recorded.whole_s) == NUM_REQUESTS
    for name in ("first_tokens_s", "intervals_s", "whole_s"):
        assert np.median(getattr(again, name)) == pytest.approx(np.median(getattr(recorded, name)), rel=0.15), name


def test_smaller_steps_make_tokens_come_sooner_and_first_tokens_later(recordings, tmp_path):
    recording, _, learned = learned_from(recordings)
    bounds = recording.fresh_core().state.limits
    tallies = []
    for most in (64, 18):
        tallies.append(Tally())
        limits = read_policy(json.dumps({"max_num_batched_tokens": most}), bounds)
        assert simulate(recording, learned, limits, tallies[-1])
    large, small = tallies
    assert np.percentile(small.intervals_s, 90) < np.percentile(large.intervals_s, 90)
    assert np.median(small.first_tokens_s) > np.median(large.first_tokens_s)
    picture = tmp_path / "picture.svg"
    table = compare(recording, '{"max_num_batched_tokens": 18}', picture)
    assert table.splitlines()[0].split() == ["recorded", "simulated", "simulated,", "with", "the", "policy"]
    assert "trust it as far as" in table
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize("policy", ["{", "[]", '{"speed": 1}', '{"itl_budget_s": -1}', '{"max_num_queued_reqs": 1.5}'])
def test_settings_that_are_none_are_refused_by_name(policy):
    with pytest.raises(RecordingError, match="--policy"):
        read_policy(policy if policy.startswith("{") else "/no/such/file", CoreLimits())
