"""The log: every line in order while it can be written, and no stop of work while it cannot."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import structlog

from paceline.process.command import complain
from paceline.process.logs import LineWriter, set_up_logs

GENEROUS_S = 30.0
PIPE_BYTES = 65536


def lost(num_lines):
    """What the writers here say of lost lines."""
    return f"{num_lines} lost\n"


@pytest.fixture
def pipe():
    """The reading and the writing end of a pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def new_writer():
    """Make writers, whose threads end with the test."""
    writers = []

    def new(*arguments, **options):
        writers.append(LineWriter(*arguments, **options))
        return writers[-1]

    yield new
    for writer in writers:
        writer.close(0)


def wait_until(condition):
    """Wait for the writer's thread."""
    until = time.monotonic() + GENEROUS_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
    assert condition()


def test_lines_come_whole_and_in_order(pipe, new_writer):
    reading, writing = pipe
    writer = new_writer(writing, lost)
    lines = [f"line {number} ☃\n" for number in range(1000)]
    for line in lines:
        writer.write(line)
    writer.finish(GENEROUS_S)
    assert os.read(reading, PIPE_BYTES).decode() == "".join(lines)
    assert writer.num_lost == 0


def test_a_line_that_cannot_be_written_is_lost_and_counted(new_writer):
    full = os.open("/dev/full", os.O_WRONLY)
    writer = new_writer(full, lost)
    for _ in range(3):
        writer.write("line\n")
    writer.finish(GENEROUS_S)
    assert writer.num_lost == 3
    os.close(full)


def test_a_log_that_nobody_reads_keeps_nobody_waiting_and_tells_its_loss_when_it_is_read(pipe, new_writer):
    reading, writing = pipe
    os.write(writing, b"\n" * PIPE_BYTES)
    writer = new_writer(writing, lost, max_waiting_lines=2)
    for number in range(5):
        writer.write(f"line {number}\n")
    assert writer.num_lost == 3
    assert os.read(reading, PIPE_BYTES) == b"\n" * PIPE_BYTES
    writer.finish(GENEROUS_S)
    writer.write("at last\n")
    writer.finish(GENEROUS_S)
    told = os.read(reading, PIPE_BYTES).decode()
    assert told.replace("3 lost\n", "", 1) == "line 0\nline 1\nat last\n"
    assert writer.num_lost == 3


def test_a_disk_that_has_room_again_gets_the_number_of_lost_lines_once(new_writer):
    file = os.open("/dev/full", os.O_WRONLY)
    writer = new_writer(file, lost)
    writer.write("first\n")
    writer.write("second\n")
    wait_until(lambda: writer.num_lost == 2)
    reading, writing = os.pipe()
    os.dup2(writing, file)
    writer.write("third\n")
    writer.write("fourth\n")
    writer.finish(GENEROUS_S)
    assert os.read(reading, PIPE_BYTES) == b"2 lost\nthird\nfourth\n"
    for number in (file, reading, writing):
        os.close(number)


def test_who_waits_for_a_clogged_log_waits_for_a_while_only(pipe, new_writer):
    _, writing = pipe
    os.write(writing, b"\n" * PIPE_BYTES)
    writer = new_writer(writing, lost)
    writer.write("last words\n")
    writer.finish(0.01)
    assert writer.num_lost == 0


def test_a_log_that_is_closed_has_written_everything_and_leaves_no_thread(pipe):
    """What comes later is lost, and waits for nobody."""
    reading, writing = pipe
    before = set(threading.enumerate())
    writer = LineWriter(writing, lost)
    writer.write("last words\n")
    writer.close(GENEROUS_S)
    writer.write("too late\n")
    wait_until(lambda: not any(thread.name == "logs" for thread in set(threading.enumerate()) - before))
    assert os.read(reading, PIPE_BYTES) == b"last words\n"
    assert writer.num_lost == 1


def test_a_complaint_without_a_stderr_is_not_put_between_the_lines_of_the_log(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", None)
    complain("paceline", "cannot listen")
    assert capsys.readouterr().out == ""


@pytest.fixture
def logs_again():
    """Logs as they were before."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_events_are_json_lines_and_so_is_the_word_of_lost_ones(tmp_path, logs_again):
    path = Path(tmp_path, "log")
    path.write_bytes(b"")
    file = os.open("/dev/full", os.O_WRONLY)
    writer = set_up_logs("info", file)
    log = structlog.get_logger("test")
    log.info("first", number=1)
    log.debug("not asked for")
    writer.finish(GENEROUS_S)
    kept = os.open(path, os.O_WRONLY)
    os.dup2(kept, file)
    log.warning("second", number=2)
    writer.finish(GENEROUS_S)
    notice, second = map(json.loads, path.read_text().splitlines())
    assert (notice["event"], notice["level"], notice["num_lines"]) == ("log_lines_lost", "warning", 1)
    assert (second["event"], second["level"], second["number"]) == ("second", "warning", 2)
    assert notice["timestamp"]
    writer.close(GENEROUS_S)
    for number in (file, kept):
        os.close(number)


def test_a_line_begins_with_when_and_what(pipe, logs_again):
    reading, writing = pipe
    log = set_up_logs("info", writing)
    structlog.get_logger().info("ready", port=5, model="m", pid=1)
    structlog.get_logger().info("ready", pid=1, port=5, model="m")
    structlog.get_logger().debug("too much")
    try:
        raise ValueError("of the test")
    except ValueError:
        structlog.get_logger().exception("failed", method="m", address="a")
    log.close(GENEROUS_S)
    *ready, failed = (list(json.loads(line)) for line in os.read(reading, PIPE_BYTES).splitlines())
    assert ready == [["timestamp", "level", "event", "model", "pid", "port"]] * 2
    assert failed == ["timestamp", "level", "event", "address", "method", "exception"]


def test_lines_that_a_full_disk_does_not_take_are_told_once_there_is_room(pipe, logs_again):
    """And nobody who logs is told, or waits."""
    reading, writing = pipe
    file = os.open("/dev/full", os.O_WRONLY)
    log = set_up_logs("info", file)
    for _ in range(3):
        structlog.get_logger().info("lost")
    log.finish(GENEROUS_S)
    os.dup2(writing, file)
    structlog.get_logger().info("first")
    structlog.get_logger().info("second")
    log.close(GENEROUS_S)
    os.close(file)

    events = [json.loads(line) for line in os.read(reading, PIPE_BYTES).splitlines()]
    assert [event["event"] for event in events] == ["log_lines_lost", "first", "second"]
    assert (events[0]["num_lines"], events[0]["level"]) == (3, "warning")
