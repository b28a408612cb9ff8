"""The log: every line in order while it can be written, and no stop of work while it cannot."""

import json
import os
import select
import threading
import time

import pytest
import structlog

from paceline.process.line_writer import LineWriter
from paceline.process.log_bounds import BURST, MAX_CAUSES, MAX_LINE_BYTES, OPERATOR, CauseLimit, shortened
from paceline.process.logs import set_up_logs
from virtual_time.clock import ManualClock

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


def test_what_is_written_need_not_end_a_line(pipe, new_writer):
    """As little as a bar on a terminal does."""
    reading, writing = pipe
    writer = new_writer(writing, lost, encoding="latin-1")
    writer.write("\r50 %")
    writer.write("\r100 % ä☃")
    writer.finish(GENEROUS_S)
    assert os.read(reading, PIPE_BYTES) == b"\r50 %\r100 % \xe4\\u2603"


def test_a_line_that_is_held_while_nothing_else_happens_is_written_all_the_same(pipe, new_writer):
    """The thread waits already, for nothing."""
    reading, writing = pipe
    writer = new_writer(writing, lost)
    time.sleep(0.05)
    writer.hold("cause", time.monotonic() + 0.01, "due\n")
    assert select.select([reading], [], [], GENEROUS_S)[0]
    assert os.read(reading, PIPE_BYTES) == b"due\n"


def events_in(reading):
    """The lines that were written."""
    return [json.loads(line) for line in os.read(reading, 1 << 20).splitlines()]


@pytest.fixture
def logs_again():
    """Logs as they were before."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


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
    *ready, failed = map(list, events_in(reading))
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

    events = events_in(reading)
    assert [event["event"] for event in events] == ["log_lines_lost", "first", "second"]
    assert (events[0]["num_lines"], events[0]["level"]) == (3, "warning")
    assert events[0]["timestamp"]


# Lines that stay short, and causes that are not told again and again, whatever a peer does


def line_of(event):
    """The line of an event, as it is written."""
    return json.dumps(shortened(event)) + "\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"reason": "x" * 10**6},
        {"reason": "☃" * 10**6},
        {"reason": '"' * 500, "address": "\\" * 500},
        {"model": "m" * 600, "reason": "r" * 600, "address": "a" * 600},
        {"executors": ["executor:1"] * 1000},
        {f"field_{number}": "value" * 10 for number in range(40)},
        {"reason": "\x1b[31m" * 300},
    ],
    ids=["long", "not ASCII", "quoted", "several", "a list", "many", "escapes"],
)
def test_a_line_is_short_whatever_is_in_it(fields):
    line = line_of({"timestamp": "2026", "level": "warning", "event": "executor_detached", **fields})
    assert len(line.encode()) <= MAX_LINE_BYTES
    assert json.loads(line)["event"] == "executor_detached"
    assert "\\u001b" not in line


def test_what_is_short_stays_as_it_is():
    event = {"event": "ready", "port": 5, "load": 0.5, "executors": ["a", "b"], "is_open": True, "model": None}
    assert shortened(dict(event)) == event


def test_the_longest_value_is_cut_first():
    short = shortened({"event": "executor_draining", "address": "executor:1", "reason": "y" * 10**6})
    assert short["address"] == "executor:1"
    assert short["reason"].startswith("yyyy")
    assert short["reason"].endswith("…")


def test_a_traceback_is_kept_and_one_of_a_megabyte_loses_its_middle():
    trace = "Traceback\n" + "  line\n" * 300
    assert shortened({"event": "failed", "exception": trace})["exception"] == trace
    cut = shortened({"event": "failed", "exception": "first" + "x" * 10**6 + "last"})["exception"]
    assert len(cut) < 20_000
    assert (cut[:5], cut[-4:]) == ("first", "last")


def test_a_cause_may_be_told_some_times_at_once_then_once_a_second():
    clock = ManualClock(100.0)
    limit = CauseLimit(clock)
    assert [limit.admit({"event": "e", "address": "a"})[1] for _ in range(BURST)] == [None] * BURST
    last = {"event": "e", "address": "a"}
    assert [limit.admit(event)[1] for event in (dict(last), dict(last), last)] == [101.0] * 3
    assert last["num_unsaid"] == 2
    clock.advance(1.5)
    assert limit.admit({"event": "e", "address": "a"})[1] == 102.0
    clock.advance(1 + BURST + 1)
    assert [limit.admit({"event": "e", "address": "a"})[1] for _ in range(BURST)] == [None] * BURST


def test_causes_do_not_keep_each_other_back():
    limit = CauseLimit(ManualClock(100.0))
    for _ in range(BURST):
        limit.admit({"event": "e", "address": "a"})
    assert limit.admit({"event": "e", "address": "a"})[1] is not None
    assert limit.admit({"event": "e", "address": "b"})[1] is None
    assert limit.admit({"event": "f", "address": "a"})[1] is None
    assert limit.admit({"event": "e", "address": "a", "method": "m"})[1] is None


def test_what_this_process_does_by_itself_is_always_told():
    """Its progress, for one; and what an operator did."""
    limit = CauseLimit(ManualClock(100.0))
    assert {limit.admit({"event": "warm_up"})[1] for _ in range(100)} == {None}
    assert {limit.admit({"event": "e", "address": "a", "by": OPERATOR})[1] for _ in range(100)} == {None}


def test_causes_that_somebody_makes_up_take_no_memory():
    limit = CauseLimit(ManualClock(100.0))
    for number in range(2 * MAX_CAUSES):
        limit.admit({"event": "e", "address": f"{number}"})
    assert len(limit._causes) == MAX_CAUSES


def test_three_thousand_lines_of_one_cause_are_a_few(pipe, logs_again):
    reading, writing = pipe
    writer = set_up_logs("info", writing)
    log = structlog.get_logger()
    for number in range(3000):
        log.info("waiting_in_line", address="liar:1", number=number)
    writer.close(GENEROUS_S)
    events = events_in(reading)
    assert len(events) <= BURST + 5
    assert (events[-1]["number"], events[0]["number"]) == (2999, 0)
    assert sum(event.get("num_unsaid", 0) + 1 for event in events) == 3000


def test_a_line_that_was_held_back_is_written_when_its_time_has_come(pipe, logs_again):
    """Though nothing else is logged."""
    reading, writing = pipe
    writer = set_up_logs("info", writing)
    for number in range(BURST + 1):
        structlog.get_logger().info("flaps", address="liar:1", number=number)
    until = time.monotonic() + GENEROUS_S
    events = []
    while len(events) < BURST + 1 and time.monotonic() < until:
        events += events_in(reading)
    assert events[-1]["number"] == BURST
    writer.close(GENEROUS_S)
