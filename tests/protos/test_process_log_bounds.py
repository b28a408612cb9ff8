"""Lines that stay short, and causes that are not told again and again, whatever a peer does."""

import json
import os
import time

import pytest
import structlog

from paceline.process.log_bounds import BURST, MAX_CAUSES, MAX_LINE_BYTES, OPERATOR, CauseLimit, shortened
from paceline.process.logs import set_up_logs

GENEROUS_S = 30.0


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


class Clock:
    """A clock that stands until it is told."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        """Tell the time."""
        return self.now_s


def test_a_cause_may_be_told_some_times_at_once_then_once_a_second():
    clock = Clock()
    limit = CauseLimit(clock)
    assert [limit.admit({"event": "e", "address": "a"})[1] for _ in range(BURST)] == [None] * BURST
    last = {"event": "e", "address": "a"}
    assert [limit.admit(event)[1] for event in (dict(last), dict(last), last)] == [101.0] * 3
    assert last["num_unsaid"] == 2
    clock.now_s = 101.5
    assert limit.admit({"event": "e", "address": "a"})[1] == 102.0
    clock.now_s = 102.5 + BURST + 1
    assert [limit.admit({"event": "e", "address": "a"})[1] for _ in range(BURST)] == [None] * BURST


def test_causes_do_not_keep_each_other_back():
    limit = CauseLimit(Clock())
    for _ in range(BURST):
        limit.admit({"event": "e", "address": "a"})
    assert limit.admit({"event": "e", "address": "a"})[1] is not None
    assert limit.admit({"event": "e", "address": "b"})[1] is None
    assert limit.admit({"event": "f", "address": "a"})[1] is None
    assert limit.admit({"event": "e", "address": "a", "method": "m"})[1] is None


def test_what_this_process_does_by_itself_is_always_told():
    """Its progress, for one; and what an operator did."""
    limit = CauseLimit(Clock())
    assert {limit.admit({"event": "warm_up"})[1] for _ in range(100)} == {None}
    assert {limit.admit({"event": "e", "address": "a", "by": OPERATOR})[1] for _ in range(100)} == {None}


def test_causes_that_somebody_makes_up_take_no_memory():
    limit = CauseLimit(Clock())
    for number in range(2 * MAX_CAUSES):
        limit.admit({"event": "e", "address": f"{number}"})
    assert len(limit._causes) == MAX_CAUSES


@pytest.fixture
def logs_again():
    """Logs as they were before."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def events_in(reading):
    """The lines that were written."""
    return [json.loads(line) for line in os.read(reading, 1 << 20).splitlines()]


def test_three_thousand_lines_of_one_cause_are_a_few(logs_again):
    reading, writing = os.pipe()
    writer = set_up_logs("info", writing)
    log = structlog.get_logger()
    for number in range(3000):
        log.info("waiting_in_line", address="liar:1", number=number)
    writer.close(GENEROUS_S)
    events = events_in(reading)
    assert len(events) <= BURST + 5
    assert (events[-1]["number"], events[0]["number"]) == (2999, 0)
    assert sum(event.get("num_unsaid", 0) + 1 for event in events) == 3000
    os.close(reading)
    os.close(writing)


def test_a_line_that_was_held_back_is_written_when_its_time_has_come(logs_again):
    """Though nothing else is logged."""
    reading, writing = os.pipe()
    writer = set_up_logs("info", writing)
    for number in range(BURST + 1):
        structlog.get_logger().info("flaps", address="liar:1", number=number)
    until = time.monotonic() + GENEROUS_S
    events = []
    while len(events) < BURST + 1 and time.monotonic() < until:
        events += events_in(reading)
    assert events[-1]["number"] == BURST
    writer.close(GENEROUS_S)
    os.close(reading)
    os.close(writing)
