"""A request's story is told from a recording, over as many files as it went through."""

from dataclasses import replace

import pytest

from both_sides.audited import make_executor
from both_sides.recorded import RecordedHarness, Recordings
from paceline_scheduler.errors import RecordingError
from paceline_scheduler.recording.replay import follow
from paceline_scheduler.recording.story import Requests, Story
from scheduler_rig.requests import make_request

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def recorded():
    """The same in one file and in many: twelve requests, a broken stream and a lost executor in their middle."""
    whole, in_parts = Recordings(is_raw=False), Recordings(is_raw=False, max_file_bytes=3000)
    harness = RecordedHarness([whole, in_parts], make_executor(num_blocks=40, incarnation=1, end_probability=0.0))
    for number in range(12):
        harness.submit(make_request(range(1, 14), NUM_TOKENS, request_id=f"request-{number:02}", is_resumable=True))
    for step in range(60):
        harness.clock.advance(0.01)
        harness.step()
        if step == 20:
            harness.break_stream(drops_plans=True)
        if step == 30:
            harness.die()
    harness.finish()
    (one,) = whole.read()
    parts = list(in_parts.read())
    assert len(parts) > 5
    return one, parts


def told(recordings, wanted):
    """The lines of all completions that are found."""
    story = Story(wanted)
    _, done = follow(recordings, story)
    assert [each.difference for each in done if each.difference] == []
    return {name: list(story.lines(name)) for name in story.request_ids()}


def outline(listed):
    """What is printed of it."""
    return listed.key, listed.num_prompt_tokens, listed.first_s, listed.outcome, listed.ended.times


def sentences(recordings, wanted):
    """Of the one request that is found."""
    ((_, lines),) = told(recordings, wanted)[wanted]
    return [sentence for _, sentence in lines]


def test_a_story_over_many_files_is_that_of_one(recorded):
    one, parts = recorded
    stories = told([one], "request-")
    assert len(stories) == 12
    assert told(parts, "request-") == stories
    lines = sentences(parts, "request-00")
    assert lines[0].startswith("submitted: 13 prompt tokens")
    assert sum(line.startswith("placed on row") for line in lines) >= 2
    assert any("is lost" in line for line in lines)
    assert lines[-1].startswith(f"ended: LENGTH after {NUM_TOKENS} tokens")


def test_a_request_that_runs_where_the_files_begin_has_a_story_from_there_on(recorded):
    _, parts = recorded
    later, requests = parts[len(parts) // 3 :], Requests()
    follow(later, requests)
    known = [key.request_id for key in requests.found]
    assert len(known) > 1
    for request_id in (known[0], known[-1]):
        first, *_, last = sentences(later, request_id)
        assert first.startswith("known already when the recording begins: ")
        assert last.startswith(f"ended: LENGTH after {NUM_TOKENS} tokens")


def test_a_request_that_was_cancelled_while_it_waited_has_nothing_of_who_came_after_it():
    recordings = Recordings(is_raw=False)
    executor = make_executor(num_blocks=40, incarnation=1, end_probability=0.0)
    harness = RecordedHarness([recordings], executor)
    victim = make_request(range(1, 14), NUM_TOKENS, request_id="victim", is_resumable=True)
    harness.submit(victim)
    harness.steps(5)
    harness.lose()
    harness.cancel(victim)
    executor.restart()
    harness.attach()
    harness.submit(make_request(range(20, 40), NUM_TOKENS, request_id="other"))
    harness.finish()
    lines = sentences(list(recordings.read()), "victim")
    assert lines[-1].startswith("ended: CANCELLED")


def test_the_requests_of_many_files_are_those_of_one(recorded):
    one, parts = recorded
    listed, in_parts = Requests(), Requests()
    assert follow([one], listed)[0] == follow(parts, in_parts)[0]
    assert [outline(each) for each in in_parts.found.values()] == [outline(each) for each in listed.found.values()]


def test_files_in_another_order_or_of_another_scheduler_are_refused(recorded):
    _, (first, second, third, *_) = recorded
    with pytest.raises(RecordingError, match="files 2 to 2 are missing"):
        follow([first, third], Requests())
    with pytest.raises(RecordingError, match="oldest first"):
        follow([second, first], Requests())
    other = replace(second, header=replace(second.header, scheduler_id="scheduler-2"))
    with pytest.raises(RecordingError, match="several schedulers"):
        follow([first, other], Requests())
