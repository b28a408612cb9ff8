"""Traces: reading both forms, scaling them, and what equal hash ids mean for prompts."""

import json

import pytest

from paceline_cli.bench.errors import TraceError
from paceline_cli.bench.prompts import PromptWriter
from paceline_cli.bench.traces import Scale, TraceRow, read_trace, replay

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
ROWS = [
    {"timestamp": 500, "input_length": 1300, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 1500, "output_length": 3, "hash_ids": [0, 1, 3]},
    {"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]},
]


def file_with(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def jsonl(*rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def shapes(requests):
    """Prompt length, output length and time of each request."""
    return [(item.num_prompt_tokens, item.num_output_tokens, item.at_seconds) for item in requests]


def test_a_csv_trace_has_times_and_lengths(tmp_path):
    """The first request comes at 0 s; seven decimals are no problem."""
    requests = replay(read_trace(file_with(tmp_path, "t.csv", CSV), None), Scale())
    assert [shape[:2] for shape in shapes(requests)] == [(374, 44), (396, 109), (879, 55)]
    assert [item.at_seconds for item in requests] == pytest.approx([0, 4.314579, 4.541877], abs=1e-5)


def test_times_with_a_zone_and_a_mark_at_the_start_are_read(tmp_path):
    """As later traces and spreadsheets have them; only so many rows as asked for."""
    text = "\ufeff" + CSV.replace("00,", "00+00:00,")
    assert len(read_trace(file_with(tmp_path, "t.CSV", text), 2)) == 2


def test_a_jsonl_trace_has_prefixes_too(tmp_path):
    path = file_with(tmp_path, "t.jsonl", jsonl(*ROWS) + "\n")
    rows = read_trace(path, None)
    assert rows[1] == TraceRow(2.5, 1500, 3, (0, 1, 3))
    assert shapes(replay(rows, Scale())) == [(1300, 500, 0), (1500, 3, 2), (600, 7, 2)]


def test_equal_hash_ids_are_equal_prefixes_of_512_tokens_each():
    rows = [TraceRow(0, row["input_length"], 1, tuple(row["hash_ids"])) for row in ROWS]
    first, second, third = (PromptWriter(1000, 0).write(item.segments) for item in replay(rows, Scale()))
    assert first[:1024] == second[:1024]
    assert first[1024:1040] != second[1024:1040]
    assert first[:512] == third[:512]
    assert first[512:528] != third[512:528]


@pytest.mark.parametrize("scale", [0.125, 0.3, 0.001])
def test_scaled_lengths_keep_shared_prefixes(scale):
    rows = [TraceRow(0, row["input_length"], row["output_length"], tuple(row["hash_ids"])) for row in ROWS]
    requests = replay(rows, Scale(lengths=scale))
    for row, item in zip(rows, requests, strict=True):
        assert item.num_prompt_tokens == max(1, round(row.input_len * scale))
        assert item.num_output_tokens == max(1, round(row.output_len * scale))
    first, second, _ = (PromptWriter(1000, 0).write(item.segments) for item in requests)
    shared = min(round(1024 * scale), len(first))
    assert first[:shared] == second[:shared]


def test_prompts_without_hash_ids_share_nothing():
    rows = [TraceRow(0, 40, 1), TraceRow(0, 40, 1), TraceRow(0, 600, 1, (9,)), TraceRow(0, 600, 1, (9,))]
    first, second, third, fourth = (PromptWriter(1000, 0).write(item.segments) for item in replay(rows, Scale()))
    assert first[0] != second[0]
    assert third[:512] == fourth[:512]
    assert third[512] != fourth[512]


def test_a_scaled_rate_makes_the_same_requests_come_faster():
    rows = [TraceRow(7, 1, 3), TraceRow(5, 1, 1), TraceRow(6, 1, 2)]
    assert shapes(replay(rows, Scale(rate=2))) == [(1, 1, 0), (1, 2, 0.5), (1, 3, 1)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("t.csv", "time,in,out\n1,2,3\n", "has the columns TIMESTAMP, ContextTokens, .* here are: time, in, out"),
        ("t.csv", "", "the columns here are: none"),
        ("t.csv", CSV.splitlines()[0], "has no rows"),
        ("t.csv", CSV.replace("396", "many"), "line 3: .*'many'"),
        ("t.csv", CSV.replace(",109", ""), "line 3: the line ends before its last column"),
        ("t.csv", CSV.replace("2023-11-16 18:15:50", "yesterday"), "line 3: Invalid isoformat"),
        ("t.jsonl", jsonl({"time": 1}), "line 1: a row has the fields timestamp"),
        ("t.jsonl", jsonl(ROWS[0]) + "{", "line 2: Expecting"),
        ("t.jsonl", jsonl(ROWS[0] | {"input_length": 0}), "line 1: no request has 0 prompt"),
        ("t.jsonl", jsonl(ROWS[0] | {"timestamp": float("nan")}), "line 1: no request has .* at nan s"),
        ("t.jsonl", jsonl(ROWS[0] | {"hash_ids": ["a"]}), "line 1: hash_ids is no list of whole numbers"),
        ("t.jsonl", "\n", "has no rows"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_with_its_line(tmp_path, name, text, expected):
    with pytest.raises(TraceError, match=expected):
        read_trace(file_with(tmp_path, name, text), None)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\x1f\x8b\xff\xfe")
    with pytest.raises(TraceError, match="can't decode byte"):
        read_trace(path, None)
