"""`paceline bench` as it is typed: tables, files, exit codes and Ctrl-C, against a scripted scheduler."""

import itertools
import json
import os
import signal
import sys

import grpc
import pytest
from typer.testing import CliRunner

from paceline_cli.app import app
from paceline_client.results import FinishReason
from paceline_client.testing import End, Fail, FakeServer, Hold, Tokens

SMALL = ["--num-prompts", "3", "--input-len", "4", "--output-len", "5"]
# What `vllm bench serve --save-result --save-detailed` writes and tools read, of what applies to any server.
VLLM_FIELDS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors"),
    *(f"{kind}_{of}_ms" for kind in ("mean", "median", "std", "p90", "p99") for of in ("ttft", "tpot", "itl", "e2el")),
}


def bench(*arguments, target=None):
    return CliRunner().invoke(app, ["bench", *([] if target is None else ["--target", target]), *arguments])


def answer(request):
    """A script: as many tokens as asked for."""
    steps = [Tokens((number,)) for number in range(request.stopping.max_tokens)]
    return [*steps, End(FinishReason.LENGTH, num_prompt_tokens=len(request.token_ids.ids))]


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def measure(tmp_path):
    """Run the command against a scripted scheduler; returns its result and the lines of its file."""
    path = tmp_path / "results.jsonl"

    def measure(*arguments, script=answer):
        with FakeServer(script) as server:
            result = bench("--output", str(path), *arguments, target=server.target)
        return result, lines_of(path)

    return measure


def test_a_ladder_has_a_table_per_rung_and_one_over_all_and_a_line_per_rung_in_the_names_of_vllm(tmp_path):
    """With every kind of time, and rates; nothing on stderr where nobody looks."""
    path = tmp_path / "results.jsonl"
    path.write_text("an earlier result\n")
    with FakeServer(answer) as server:
        result = bench(*SMALL, "--max-concurrency", "1,2", "--output", str(path), target=server.target)
        assert len(server.seen.requests) == 7
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("(TTFT)") == result.stdout.count("(ITL)") == 2
    assert "concurrency 1: 3 requests in " in result.stdout
    assert result.stdout.splitlines()[-1].split()[:2] == ["concurrency", "2"]
    first, second = lines_of(path)
    assert set(first) >= VLLM_FIELDS
    assert (first["max_concurrency"], second["max_concurrency"], first["request_rate"]) == (1, 2, "inf")
    assert (first["completed"], first["failed"], first["errors"]) == (3, 0, ["", "", ""])
    assert (first["input_lens"], first["output_lens"], first["total_input_tokens"]) == ([4] * 3, [5] * 3, 12)
    assert [len(gaps) for gaps in first["itls"]] == [4, 4, 4]
    assert first["mean_ttft_ms"] == pytest.approx(sum(first["ttfts"]) / 3 * 1000)
    assert first["latencies"][0] == pytest.approx(first["ttfts"][0] + sum(first["itls"][0]))
    assert (first["model_id"], first["backend"], first["request_goodput"]) == ("fake", "paceline", None)
    assert first["workload"] == {
        "max_concurrency": "1,2",
        "input_len": "4",
        "output_len": "5",
        "num_prompts": 3,
        "seed": 0,
        "ignore_eos": True,
        "temperature": 0.0,
    }


def test_an_open_loop_says_how_late_it_sent(measure):
    """Because a client that cannot keep up would measure itself."""
    result, (fields,) = measure(*SMALL, "--request-rate", "200")
    assert "sent late by" in result.stdout
    assert (fields["request_rate"], fields["burstiness"], fields["max_concurrency"]) == (200, 1, None)
    assert len(fields["queue_times"]) == 3
    assert fields["p99_client_queue_time_ms"] >= 0


def test_a_trace_is_replayed_with_its_lengths(measure, tmp_path):
    trace = tmp_path / "short.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,80,16\n2023-11-16 18:15:47,40,8\n")
    result, (fields,) = measure("--trace", str(trace), "--scale-lengths", "0.125", "--scale-rate", "100")
    assert "trace short.csv: 2 requests" in result.stdout
    assert (fields["input_lens"], fields["output_lens"]) == ([10, 5], [2, 1])
    assert (fields["trace"], fields["scale_lengths"], fields["scale_rate"]) == ("short.csv", 0.125, 100)


def test_goodput_and_cost_are_shown_where_they_are_asked_for(measure):
    """Objectives as vllm bench serve takes them: several after one option."""
    options = ["--cost-per-hour", "2", "--goodput", "ttft:60000", "tpot:60000"]
    result, (first, _) = measure(*SMALL, "--max-concurrency", "1,3", *options)
    assert "goodput: 100.0% of the requests" in result.stdout
    assert "cost per million tokens" in result.stdout
    assert (first["goodput_share"], first["request_goodput"]) == (1, first["request_throughput"])
    assert first["cost_per_million_output_tokens"] == pytest.approx(2 * first["duration"] / 3600 / 15 * 1e6)


def test_failures_are_counted_and_end_nothing(measure):
    full, has_room = [Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")], itertools.cycle([True, False])
    options = "--num-prompts", "4", "--max-concurrency", "1"
    result, (fields,) = measure(*options, script=lambda request: answer(request) if next(has_room) else full)
    assert result.exit_code == 0
    assert "failed: 2 requests with OverloadedError, such as: the queue is full" in result.stdout
    assert (fields["completed"], fields["failed"], fields["failures"]) == (2, 2, {"OverloadedError": 2})
    assert fields["errors"][0] == "OverloadedError: the queue is full"


def test_a_run_in_which_everything_failed_is_a_failure_and_one_that_did_not_begin_leaves_the_earlier_result(tmp_path):
    """Whatever the table says. Without a warm-up, which says so before, it begins."""
    path = tmp_path / "results.jsonl"
    path.write_text("an earlier result\n")
    with FakeServer([Fail(grpc.StatusCode.INTERNAL, "broken")]) as server:
        warmed = bench(*SMALL, "--max-concurrency", "1", "--output", str(path), target=server.target)
        result = bench(*SMALL, "--max-concurrency", "1", "--num-warmups", "0", target=server.target)
    assert (warmed.exit_code, warmed.stdout, warmed.stderr) == (70, "", "error: broken\n")
    assert path.read_text() == "an earlier result\n"
    assert (result.exit_code, result.stderr) == (1, "error: every request failed\n")


def test_requests_that_cannot_fit_are_announced(measure):
    result, _ = measure(*SMALL[:2], "--max-concurrency", "2", "--input-len", "2000")
    assert result.stderr.startswith("warning: 3 requests do not fit the model's context of 2,048 tokens")


def test_plots_are_pictures(measure, tmp_path):
    folder = tmp_path / "new" / "plots"
    result, _ = measure(*SMALL, "--max-concurrency", "2,2", "--plot", str(folder))
    assert result.exit_code == 0, result.output
    names = ["itl_over_time_1_concurrency_2.png", "itl_over_time_2_concurrency_2.png", "throughput_latency.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (["--target", "127.0.0.1:1"], 69, "Start one with: paceline up"),
        (["--backend", "openai"], 65, "--backend openai needs --base-url, such as http://localhost:8000/v1"),
        (["--backend", "openai", "--base-url", "http://127.0.0.1:1/v1"], 69, "no server answers at http://127.0.0.1:1"),
        (["--base-url", "http://x/v1"], 65, "--base-url belongs to --backend openai"),
        (["--max-concurrency", "none"], 65, "--max-concurrency: 'none' is no list of numbers above 0"),
        (["--trace", "nowhere.csv"], 65, "cannot read nowhere.csv: No such file"),
        (["--goodput", "fast"], 65, "'fast' is no objective"),
        (["tpot:50"], 65, "what is 'tpot:50'?"),
        (["--output", "/nowhere/results.jsonl"], 1, "--output: cannot write /nowhere/results.jsonl: No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line_that_says_what_to_do(arguments, exit_code, expected):
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("matplotlib", ["--plot", "folder"]),
        ("httpx2", ["--backend", "openai", "--base-url", "http://127.0.0.1:1/v1"]),
    ],
)
def test_a_missing_library_says_how_to_get_it(monkeypatch, module, arguments):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "paceline_cli.bench.openai_target", raising=False)
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith(f"needs {module}: in the checkout, pip install ./protos ./clients '.[bench]'\n")


def test_ctrl_c_ends_in_good_order_with_what_was_measured(tmp_path):
    """Two were answered, two were running; the server hears that nobody waits for those."""
    numbers = itertools.count(1)

    def script(request):
        number = next(numbers)
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return answer(request) if number <= 2 else [Tokens((1,)), Hold()]

    path = tmp_path / "results.jsonl"
    options = ["--num-warmups", "0", "--max-concurrency", "2,4", "--output", str(path)]
    with FakeServer(script) as server:
        result = bench(*options, target=server.target)
        server.wait_for(lambda seen: len(seen.cancelled) == 2)
    assert (result.exit_code, result.stderr) == (130, "Interrupted; the figures are of what had ended by then.\n")
    assert "interrupted: 2 requests were still running" in result.stdout
    (fields,) = lines_of(path)
    assert (fields["completed"], fields["interrupted"], len(fields["ttfts"])) == (2, 2, 2)


def test_any_openai_compatible_endpoint_is_measured_the_same_way(tmp_path, openai_server):
    path = tmp_path / "results.jsonl"
    server = openai_server(*[{"choices": [{"text": "a"}]}] * 2, "data: [DONE]\n\n", models={"data": [{"id": "other"}]})
    options = ["--backend", "openai", "--base-url", server.base_url, "--max-concurrency", "2", "--output", str(path)]
    result = bench(*SMALL, *options)
    assert result.exit_code == 0, result.output
    assert "3 answers had fewer tokens than were asked for" in result.stdout
    (fields,) = lines_of(path)
    assert (fields["backend"], fields["model_id"], fields["completed"]) == ("openai", "other", 3)
    assert (fields["output_lens"], fields["total_cached_tokens"]) == ([2, 2, 2], None)
