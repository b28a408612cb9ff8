"""Files of recordings: how they are read when they are damaged, how they are bounded, what is not in them."""

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from both_sides.audited import make_executor
from both_sides.recorded import RecordedHarness, Recordings
from paceline.plan.values import BlockTags
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import ExecutorAttached, Tick
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.errors import InvalidRequestError, RecordingError
from paceline_scheduler.recording import file_writer, wire
from paceline_scheduler.recording.file_writer import SUFFIX, FileBounds, FileWriter
from paceline_scheduler.recording.graph import read_value, write_value
from paceline_scheduler.recording.masking import Plain
from paceline_scheduler.recording.recorder import Recorder
from paceline_scheduler.recording.replay import read_recording, replay
from paceline_scheduler.recording.standins import StandIns
from scheduler_rig.requests import column, make_request

MARK = [31_001, 17, 31_003, 29_999, 23_456, 30_007]
SOME_TOKENS = st.lists(st.integers(0, 6), max_size=12)


def recorded(*requests, is_raw=True):
    """The file of a run with these requests."""
    recordings = Recordings(is_raw=is_raw)
    harness = RecordedHarness([recordings], make_executor())
    for request in requests:
        harness.submit(request)
    harness.finish()
    (data,) = recordings.files()
    return data


@pytest.fixture(scope="module")
def data():
    """A short recording."""
    return recorded(make_request(9, 5))


def test_a_file_that_ends_within_a_record_is_read_up_to_it(data, tmp_path):
    whole = list(wire.decode(data))
    numbers = {len(list(wire.decode(data[:length]))) for length in range(len(data) + 1)}
    assert numbers == set(range(len(whole) + 1))
    path = tmp_path / f"torn{SUFFIX}"
    path.write_bytes(data[:-1])
    done = replay(read_recording(path))
    assert done.difference is None
    assert done.num_events > 3


@given(noise=st.binary(max_size=64), at=st.floats(0, 1))
def test_whatever_is_in_a_file_is_read_or_refused(data, noise, at):
    """Never anything but a RecordingError."""
    begin = round(at * len(data))
    changed = data[:begin] + noise + data[begin + len(noise) :]
    with contextlib.suppress(RecordingError):
        assert len(list(wire.decode(changed))) <= len(changed)


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\nexit 1\n", bytes(100)])
def test_another_file_is_refused(content, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(RecordingError):
        read_recording(path)


def test_no_token_of_a_client_is_in_a_file_with_stand_ins():
    """Neither of a prompt, nor of bad words, nor what a client wrote; in a raw file all of them are."""
    request = replace(make_request(MARK * 3, 5, cache_salt="a-salt"), bad_words=((29_873,),))
    marks = (column(*MARK).tobytes(), b"a-salt", b'"tuple",29873]', request.origin)
    assert all(mark in recorded(request) for mark in marks)
    hidden = recorded(request, is_raw=False)
    assert not any(mark in hidden for mark in marks)
    assert request.key.request_id.encode() in hidden
    tokens = column(*MARK).tobytes()
    pairs = [tokens[begin : begin + 8] for begin in range(0, len(tokens) - 4, 4)]
    assert not any(pair in hidden for pair in pairs)


@given(
    st.one_of(
        st.dictionaries(st.integers(-(2**63) + 1, 2**63), st.binary(min_size=3, max_size=3), min_size=60, max_size=70),
        st.dictionaries(st.binary(max_size=3), st.integers() | st.none(), min_size=60, max_size=70),
        st.lists(st.integers(0, 999), unique=True, min_size=60, max_size=70).map(OrderedDict.fromkeys),
        st.dictionaries(st.integers(), st.booleans(), min_size=60, max_size=70),
    )
)
def test_large_mappings_are_written_as_columns_and_read_in_their_order(mapping):
    """Like the keys of 100,000 cached blocks, for which the event loop waits."""
    again = read_value(*write_value(mapping, {}))
    assert type(again) is type(mapping)
    assert list(again.items()) == list(mapping.items())
    assert list(map(type, again.values())) == list(map(type, mapping.values()))


def test_the_keys_of_a_cache_are_no_values_of_their_own():
    """Each is some bytes in a column: a state with 5,000 of them costs 24 bytes and its key for each."""
    core, num_keys = Core(CoreLimits()), 5_000
    executor = make_executor(num_blocks=num_keys)
    description, snapshot = executor.attach("e")
    tags = BlockTags(np.arange(num_keys, dtype=np.int32), b"".join(n.to_bytes(16, "big") for n in range(num_keys)))
    empty = Plain().state(core.state)
    core.apply(ExecutorAttached(description, replace(snapshot, tags=tags)), 1.0)
    assert len(Plain().state(core.state)) - len(empty) < num_keys * 42


def stand_ins(vocab_size=7):
    """Stand-ins for a model with a small vocabulary, so that tokens often meet."""
    made = StandIns()
    made.describe(ExecutorDescription("e", 1, 1, "m", 8, 4, 4, 64, 64, 4, b"key", vocab_size))
    return made


@given(first=SOME_TOKENS, second=SOME_TOKENS)
def test_stand_ins_are_equal_as_far_as_the_tokens_are(first, second):
    made = stand_ins()
    hidden_first, hidden_second = (made.of("m", column(*tokens)).tolist() for tokens in (first, second))
    assert num_equal(first, second) == num_equal(hidden_first, hidden_second)
    assert all(0 <= token < 7 for token in hidden_first)


def num_equal(first, second):
    """How many items two lists begin with alike."""
    return next(
        (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )


def test_stand_ins_of_two_recordings_have_nothing_in_common():
    tokens = column(*range(1000))
    hidden = [stand_ins(1000).of("m", tokens) for _ in range(2)]
    assert np.count_nonzero(hidden[0] == hidden[1]) < 20
    assert np.count_nonzero(hidden[0] == tokens) < 20


def test_who_knows_a_request_does_not_know_how_another_one_goes_on():
    made, prefix = stand_ins(1000), [5, 6, 7]
    ends = [made.of("m", column(*prefix, token))[-1] for token in range(1000)]
    assert sorted(ends) == list(range(1000))
    distances = np.diff(ends) % 1000
    assert np.count_nonzero(distances == distances[0]) < 20


@given(prompt=SOME_TOKENS, drawn=st.lists(st.lists(st.integers(0, 6), max_size=3), max_size=6))
def test_tokens_of_results_get_the_stand_ins_of_the_whole_sequence(prompt, drawn):
    made, known = stand_ins(), list(prompt)
    made.place("e", 2, column(*prompt))
    result = next(each for each in wire.decode(recorded(make_request(1, 1))) if _is_result(each)).event.result
    for tokens in drawn:
        changed = made.result(
            "e",
            replace(result, rows=column(1, 2), num_accepted=column(0, len(tokens)), token_ids=column(*tokens)),
        )
        known += tokens
        assert changed.tolist() == made.of("m", column(*known))[len(known) - len(tokens) :].tolist()


def _is_result(record):
    return hasattr(record, "event") and hasattr(record.event, "result")


@pytest.fixture(autouse=True)
def first_write_is_like_others(monkeypatch):
    """Nobody waits for it here."""
    monkeypatch.setattr(file_writer, "_FIRST_AFTER_S", 0.2)


class Ended:
    """What is told of a FileWriter's end."""

    def __init__(self):
        self.failure, self.num_lost = None, 0
        self.has_come = threading.Event()

    def __call__(self, failure, num_lost):
        self.failure, self.num_lost = failure, num_lost
        self.has_come.set()


def test_older_files_go_when_there_are_too_many(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    bounds = FileBounds(max_file_bytes=10, max_bytes=45, max_files=3)
    for number in range(8):
        ended = Ended()
        writer = FileWriter(tmp_path, bounds, ended)
        writer.begin(tmp_path / f"{number}{SUFFIX}", lambda: b"head")
        writer.write(lambda: bytes(6), 10)
        writer.end()
        writer.join()
        assert ended.has_come.is_set()
        os.utime(tmp_path / f"{number}{SUFFIX}", (number, number))
    assert sorted(each.name for each in tmp_path.iterdir()) == [*(f"{each}{SUFFIX}" for each in (5, 6, 7)), "notes.txt"]


def test_a_full_disk_ends_the_recording_and_says_what_is_lost(tmp_path, monkeypatch):
    written = []

    def write(file, data):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(bytes(data[:3]))
        return 3

    ended = Ended()
    monkeypatch.setattr(file_writer.os, "write", write)
    writer = FileWriter(tmp_path, FileBounds(), ended)
    writer.begin(tmp_path / f"a{SUFFIX}", lambda: b"12345")
    writer.write(lambda: b"6", 10)
    assert ended.has_come.wait(60)
    assert "No space left on device" in ended.failure
    assert written == [b"123"]
    assert ended.num_lost == 1


def test_a_disk_that_is_too_slow_is_not_waited_for(tmp_path, monkeypatch):
    is_writing, goes_on, written = threading.Event(), threading.Event(), bytearray()

    def write(_, data):
        is_writing.set()
        goes_on.wait(60)
        written.extend(data)
        return len(data)

    monkeypatch.setattr(file_writer.os, "write", write)
    ended = Ended()
    writer = FileWriter(tmp_path, FileBounds(max_waiting_bytes=100), ended)
    writer.begin(tmp_path / f"a{SUFFIX}", bytes)
    writer.write(lambda: b"r", 10)
    assert is_writing.wait(60)
    for _ in range(30):
        writer.write(lambda: b"r", 10)
    assert writer.failure is not None
    goes_on.set()
    assert ended.has_come.wait(60)
    assert (written, ended.num_lost) == (b"r", 30)


def test_a_record_that_cannot_be_made_ends_the_recording(tmp_path):
    ended = Ended()
    writer = FileWriter(tmp_path, FileBounds(), ended)
    writer.begin(tmp_path / f"a{SUFFIX}", lambda: b"head")
    writer.write(lambda: bytes([256]), 10)
    assert ended.has_come.wait(60)
    assert "cannot make a record: ValueError" in ended.failure
    assert ended.num_lost == 1


def recorder_in(folder, core):
    return Recorder(lambda: core.state, folder, "scheduler-1")


def test_a_recording_is_ended_by_another_and_both_can_be_repeated(tmp_path):
    core = Core(CoreLimits())
    recorder = recorder_in(tmp_path, core)
    for name, is_raw in (("one", True), ("two", False)):
        recorder.start(name, is_raw=is_raw)
        recorder.saw(Tick(), 1.0, core.apply(Tick(), 1.0))
    recorder.close()
    files = sorted(tmp_path.iterdir())
    assert [each.name.split("-")[0] for each in files] == ["one", "two"]
    assert [each.stat().st_mode & 0o777 for each in files] == [0o600, 0o600]
    assert [replay(read_recording(each)).num_events for each in files] == [1, 1]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "ä", "x" * 65, "a\n"])
def test_a_name_that_could_lead_out_of_the_folder_is_refused(tmp_path, name):
    with pytest.raises(InvalidRequestError):
        recorder_in(tmp_path, Core(CoreLimits())).start(name, is_raw=False)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_recorded_ends_the_recording_alone(tmp_path):
    core = Core(CoreLimits())
    recorder = recorder_in(tmp_path, core)
    recorder.start("x", is_raw=True)
    recorder.saw(object(), 1.0, core.apply(Tick(), 1.0))
    recorder.saw(Tick(), 2.0, core.apply(Tick(), 2.0))
    recorder.close()
    (file,) = Path(tmp_path).iterdir()
    assert replay(read_recording(file)).num_events == 0
