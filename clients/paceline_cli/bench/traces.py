"""Recorded traffic: when requests came, how long they and their answers were, and which prefixes they shared.

Knows two forms. CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens is that of the Azure LLM inference
traces; JSON lines with timestamp (ms), input_length, output_length, hash_ids that of the Mooncake traces. Refuses to
know content: equal hash ids, one per 512 prompt tokens, mean equal text, whatever it was.
"""

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from paceline_cli.bench.errors import TraceError, WorkloadError
from paceline_cli.bench.workload import PlannedRequest, Segment

BLOCK_TOKENS = 512
_CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    seconds: float
    """On the trace's own clock."""
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    """One per 512 tokens of the prompt; none where the trace says nothing of shared prefixes."""


# The number of a line, and what makes a row of it.
Line = tuple[int, Callable[[], TraceRow]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How a trace is made to fit a smaller machine."""

    lengths: float = 1.0
    """0.125 makes prompts and outputs an eighth as long, rounded, at least 1 token."""
    rate: float = 1.0
    """2 lets the requests come twice as fast."""

    def __post_init__(self) -> None:
        for option, value in (("--scale-lengths", self.lengths), ("--scale-rate", self.rate)):
            if not 0 < value < float("inf"):
                raise WorkloadError(f"{option}: {value} is not above 0")


def read_trace(path: Path, num_rows: int | None) -> list[TraceRow]:
    """The first rows of a trace, all of them for None. `TraceError` says what is wrong, and where."""
    read = _csv_lines if path.suffix.lower() == ".csv" else _jsonl_lines
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = [_parsed(number, parse) for number, parse in itertools.islice(read(lines), num_rows)]
    except OSError as error:
        raise TraceError(f"--trace: cannot read {path}: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise TraceError(f"--trace: {path}: {error}") from None
    if not rows:
        raise TraceError(f"--trace: {path} has no rows")
    return rows


def replay(rows: Iterable[TraceRow], scale: Scale) -> list[PlannedRequest]:
    """The rows as requests, in the order of their times, the first at 0 seconds."""
    ordered = sorted(rows, key=lambda row: row.seconds)
    return [
        PlannedRequest(
            tuple(_segments(row, serial, scale.lengths)),
            _scaled(row.output_len, scale.lengths),
            (row.seconds - ordered[0].seconds) / scale.rate,
        )
        for serial, row in enumerate(ordered)
    ]


def _segments(row: TraceRow, serial: int, scale: float) -> Iterator[Segment]:
    """The blocks that may be shared, each at the same place in every prompt, then what belongs to this prompt alone."""
    num_tokens = _scaled(row.input_len, scale)
    start = 0
    for number, hash_id in enumerate(row.hash_ids, start=1):
        end = min(round(number * BLOCK_TOKENS * scale), num_tokens)
        if end > start:
            yield Segment(f"block {hash_id}", end - start)
        start = end
    if num_tokens > start:
        yield Segment(f"own {serial}", num_tokens - start, serial)


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))


def _parsed(number: int, parse: Callable[[], TraceRow]) -> TraceRow:
    try:
        return parse()
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def _csv_lines(lines: Iterable[str]) -> Iterator[Line]:
    reader = csv.DictReader(lines)
    missing = [name for name in _CSV_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        found = ", ".join(reader.fieldnames or ()) or "none"
        raise ValueError(f"a CSV trace has the columns {', '.join(_CSV_COLUMNS)}; the columns here are: {found}")
    for record in reader:
        yield reader.line_num, partial(_csv_row, record)


def _csv_row(record: Mapping[str, str | None]) -> TraceRow:
    timestamp, input_len, output_len = (record[name] for name in _CSV_COLUMNS)
    if timestamp is None or input_len is None or output_len is None:
        raise ValueError("the line ends before its last column")
    moment = datetime.fromisoformat(timestamp)
    # One without a zone is taken as it stands: local time would jump twice a year.
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return _checked(TraceRow(moment.timestamp(), int(input_len), int(output_len)))


def _jsonl_lines(lines: Iterable[str]) -> Iterator[Line]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, partial(_json_row, line)


def _json_row(line: str) -> TraceRow:
    match json.loads(line):
        case {
            "timestamp": int() | float() as milliseconds,
            "input_length": int(input_len),
            "output_length": int(output_len),
            **others,
        }:
            hash_ids = others.get("hash_ids", [])
            if not isinstance(hash_ids, list) or not all(isinstance(hash_id, int) for hash_id in hash_ids):
                raise ValueError("hash_ids is no list of whole numbers")
            return _checked(TraceRow(milliseconds / 1000, input_len, output_len, tuple(hash_ids)))
    raise ValueError("a row has the fields timestamp (ms), input_length, output_length and, if known, hash_ids")


def _checked(row: TraceRow) -> TraceRow:
    if not math.isfinite(row.seconds) or row.input_len < 1 or row.output_len < 0:
        raise ValueError(f"no request has {row.input_len} prompt and {row.output_len} output tokens at {row.seconds} s")
    return row
