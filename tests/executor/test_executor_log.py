"""The executor's log: lines while they can be written, and no stop of work while they cannot."""

import json
import os

import pytest
import structlog

from paceline_executor import __main__ as program
from paceline_executor.errors import DeviceError
from paceline_executor.logs import LineWriter, set_up_logs

GENEROUS_S = 30.0
PIPE_BYTES = 65536


@pytest.fixture(autouse=True)
def _restored_logs():
    yield
    structlog.reset_defaults()


@pytest.fixture
def pipe():
    """The reading and the writing end of a pipe."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def lost(num_lines):
    """What the writers here say of lost lines."""
    return f"{num_lines} lost\n"


def test_events_are_json_lines_with_what_happened_first(pipe):
    """Time, level, event, then the rest."""
    reading, writing = pipe
    log = set_up_logs("info", writing)
    structlog.get_logger().info("ready", port=5)
    structlog.get_logger().debug("too much")
    log.close(GENEROUS_S)

    assert list(json.loads(os.read(reading, PIPE_BYTES))) == ["timestamp", "level", "event", "port"]


def test_lines_that_a_full_disk_does_not_take_are_told_once_there_is_room(pipe):
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


def test_a_log_that_nobody_reads_keeps_nobody_waiting(pipe):
    """What finds no room is counted; what was taken comes out whole when somebody reads."""
    reading, writing = pipe
    os.write(writing, b"\n" * PIPE_BYTES)
    writer = LineWriter(writing, lost, max_waiting_lines=2)
    for number in range(5):
        writer.write(f"line {number}\n")
    writer.finish(0.01)
    assert os.read(reading, PIPE_BYTES) == b"\n" * PIPE_BYTES
    writer.finish(GENEROUS_S)
    writer.write("at last\n")
    writer.close(GENEROUS_S)

    told = os.read(reading, PIPE_BYTES).decode()
    assert told.replace("3 lost\n", "", 1) == "line 0\nline 1\nat last\n"


def test_why_an_executor_that_worked_has_ended_is_in_its_log(capfd, monkeypatch):
    """What it says on stderr may be elsewhere."""

    async def fail(_):
        raise DeviceError("steps fail")

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr("paceline_executor.process.run", fail)
    monkeypatch.setattr(program, "_end_quietly_on_signals", lambda: None)
    monkeypatch.setattr("os._exit", end)
    with pytest.raises(SystemExit) as ended:
        program.main(["--model", "any"])

    printed = capfd.readouterr()
    (line,) = printed.out.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["reason"]) == ("failed", "error", "steps fail")
    assert printed.err == "paceline-executor: error: steps fail\n"
    assert ended.value.code == program.ExitCode.FAILED
