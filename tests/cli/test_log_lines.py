"""What children print becomes progress, readiness, or words; nothing they print breaks the reader."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_cli.supervisor.log_lines import (
    MAX_LINE_BYTES,
    Finishing,
    Level,
    LineSplitter,
    OtherLine,
    Progress,
    Ready,
    parse_line,
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"event": "ready", "model": "m"}, Ready()),
        ({"event": "model_fetch", "phase": "downloading", "fraction": 0.25},
         Progress("fetching the model (downloading)", 0.25)),
        ({"event": "model_load"}, Progress("loading the model", None)),
        ({"event": "warm_up", "phase": "compiling", "fraction": 7}, Progress("warming up (compiling)", 1.0)),
        ({"event": "warm_up", "phase": "compile decoder over int8", "fraction": 0.0},
         Progress("compiling for this processor, once, a minute or two (compile decoder over int8)", 0.0)),
        ({"event": "warm_up", "fraction": "half"}, Progress("warming up", None)),
        ({"event": "warm_up", "fraction": 10**400}, Progress("warming up", 1.0)),
        ({"event": "warm_up", "fraction": -(10**400)}, Progress("warming up", 0.0)),
        ({"event": "warm_up", "fraction": math.inf}, Progress("warming up", 1.0)),
        ({"event": "warm_up", "fraction": math.nan}, Progress("warming up", None)),
        ({"event": "warm_up", "fraction": True}, Progress("warming up", None)),
        ({"event": "executor_unreachable", "level": "warning",
          "reason": "UNAVAILABLE: failed to connect; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"},
         Progress("waiting for an executor (Connection refused)", None)),
        ({"event": "waiting_for_executor", "reason": "UNAVAILABLE: the model is still loading; wait"},
         Progress("waiting for an executor (the model is still loading)", None)),
        ({"event": "draining", "num_requests": 3, "shutdown_timeout_s": 30.0}, Finishing(3)),
        ({"event": "still_running", "num_requests": 2}, Finishing(2)),
        ({"event": "still_running", "num_requests": "many"}, OtherLine(Level.INFO, "still_running")),
        ({"event": "still_running", "num_requests": True}, OtherLine(Level.INFO, "still_running")),
        ({"event": "draining"}, OtherLine(Level.INFO, "draining")),
        ({"event": "listening", "level": "info"}, OtherLine(Level.INFO, "listening")),
        ({"event": "executor_lost", "level": "warning"}, OtherLine(Level.WARNING, "executor_lost")),
        ({"event": "failed", "level": "error", "error": "no room"}, OtherLine(Level.ERROR, "failed: no room")),
        ({"event": "failed", "level": "error", "exception": "Traceback ...\nOSError: bad"},
         OtherLine(Level.ERROR, "failed: OSError: bad")),
        ({"event": 3}, OtherLine(Level.INFO, '{"event": 3}')),
        ([1, 2], OtherLine(Level.INFO, "[1, 2]")),
    ],
)  # fmt: skip
def test_log_lines(fields, expected):
    assert parse_line(json.dumps(fields).encode(), Level.INFO) == expected


@given(st.binary(max_size=60))
def test_anything_can_be_printed(raw):
    assert isinstance(parse_line(raw, Level.WARNING), OtherLine | Ready | Progress)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 60_000,
        b'{"event": "model_load", "fraction": ' + b'{"a":' * 10_000,
        b'{"event": "x", "level": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"event": "model_load", "fraction": ' + b"9" * 400 + b"}",
        b'{"event": "model_load", "fraction": ' + b"9" * 5000 + b"}",
        b'{"event": "model_load", "fraction": NaN}',
        b'{"event": "model_load", "fraction": -1e999}',
        b'{"event": "model_load", "fraction": [0.5]}',
        b'{"event": "model_load", "phase": "\\ud800"}',
    ],
    ids=lambda raw: raw[:60].decode(),
)
def test_no_line_stops_the_reader(raw):
    match parse_line(raw, Level.INFO):
        case Progress(_, fraction):
            assert fraction is None or 0 <= fraction <= 1
        case line:
            assert isinstance(line, OtherLine)


@given(st.lists(st.binary(max_size=5).filter(lambda b: b"\n" not in b), max_size=6), st.data())
def test_lines_do_not_depend_on_how_they_arrive(lines, data):
    stream = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    splitter = LineSplitter()
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [line for piece in pieces for line in splitter.feed(piece)] == lines
    assert list(splitter.end()) == []


def test_a_line_without_an_end_is_the_last_one():
    splitter = LineSplitter()
    assert list(splitter.feed(b"half")) == []
    assert list(splitter.end()) == [b"half"]


def test_an_endless_line_is_cut():
    splitter = LineSplitter()
    for _ in range(3):
        assert list(splitter.feed(b"x" * MAX_LINE_BYTES)) == []
    assert list(splitter.feed(b"\nnext\n")) == [b"x" * MAX_LINE_BYTES, b"next"]
