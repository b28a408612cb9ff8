"""`paceline validate` with a stand-in for the executor: verdicts, exit codes, the table, JSON, one model at a time."""

import json
import signal
import sys

import pytest

from paceline_cli.commands import validate as command
from paceline_cli.commands.validate import Verdict, verdict_of

FIGURES = {
    "num_windows": 60,
    "num_predicted": 30_000,
    "base_perplexity": 10.0,
    "perplexity": 10.1,
    "increase": 0.01,
    "lower": 0.005,
    "upper": 0.015,
    "mean_divergence": 0.0123,
    "p99_divergence": 0.25,
    "same_best": 0.9512,
    "num_answers": 8,
    "num_same_answers": 6,
    "first_difference": 11,
}
BEYOND = {"increase": 0.03, "lower": 0.025, "upper": 0.035}
ACROSS = {"increase": 0.017, "lower": 0.011, "upper": 0.023}
SHORT = {"num_windows": 1, "num_predicted": 184, "lower": None, "upper": None}
SIDE = {"model": "tiny [W4A16]", "quantization": "Q4_1", "computed": "auto", "kv_cache": "int8", "device": "cpu"}
LOOKED = ["validate-candidate"] * 2  # begun and ended
STAND_IN = """\
import json, os, pathlib, sys, time
role, folder, *options = sys.argv[1:]
plan = json.loads(pathlib.Path(sys.argv[0]).with_name("plan.json").read_text())
with open(plan["log"], "a") as log:
    print(json.dumps([role, options, json.loads(pathlib.Path(folder, "request.json").read_text())]), file=log)
print(json.dumps({"event": "validate", "phase": "prose", "fraction": 0.5}), flush=True)
if (code := plan["failing"].get(role)) is not None:
    print("paceline-executor: error: it is damaged", file=sys.stderr, flush=True)
    if code < 0:
        os.kill(os.getpid(), -code)
    if code == 0:
        os.kill(os.getppid(), plan["signal"])
        time.sleep(60)
    sys.exit(code)
time.sleep(0.1)
if role == "validate-candidate":
    pathlib.Path(folder, "result.json").write_text(json.dumps(plan["result"]))
with open(plan["log"], "a") as log:
    print(json.dumps([role, folder]), file=log)
"""


@pytest.fixture
def validated(tmp_path, monkeypatch, run_main, capsys):
    """Run the command; returns its exit code, what it printed, and what the executors were told, in order."""
    script, log = tmp_path / "paceline-executor", tmp_path / "log"
    script.write_text(f"#!{sys.executable}\n{STAND_IN}")
    script.chmod(0o755)
    monkeypatch.setattr(command, "find_script", lambda _: str(script))

    def validated(*arguments, failing=None, signal_number=0, **texts):
        result = {"base": SIDE, "candidate": SIDE, "texts": texts or {"prose": FIGURES}}
        plan = {"log": str(log), "failing": failing or {}, "signal": signal_number, "result": result}
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        code = run_main("validate", "small", "--against", "large", *arguments)
        lines = log.read_text().splitlines() if log.exists() else []
        return code, capsys.readouterr(), [json.loads(line) for line in lines]

    return validated


@pytest.mark.parametrize(
    ("texts", "verdict"),
    [
        ([{}], Verdict.WITHIN),
        ([BEYOND], Verdict.BEYOND),
        ([ACROSS], Verdict.UNDECIDED),
        ([SHORT], Verdict.UNDECIDED),
        ([BEYOND | SHORT], Verdict.UNDECIDED),
        ([{"num_windows": 15}], Verdict.UNDECIDED),
        ([{"num_predicted": 1_999}], Verdict.UNDECIDED),
        ([{"upper": 0.02}], Verdict.WITHIN),
        ([BEYOND | {"lower": 0.02}], Verdict.UNDECIDED),
        ([{"increase": -0.02, "lower": -0.03, "upper": -0.01}], Verdict.WITHIN),
        ([{}, ACROSS], Verdict.UNDECIDED),
        ([SHORT, BEYOND], Verdict.BEYOND),
        ([{}, BEYOND], Verdict.BEYOND),
    ],
)
def test_the_upper_end_of_every_interval_decides(texts, verdict):
    assert verdict_of({str(index): FIGURES | text for index, text in enumerate(texts)}, 0.02) is verdict


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({}, 0, ["Good enough: perplexity increases by at most +1.50%", "2 % is allowed", "float8, W8A8, W4A16"]),
        (BEYOND, 1, ["Not good enough: perplexity increases by more than 2 %", "one step back", "--kv-cache-dtype"]),
        (ACROSS, 10, ["Undecided", "holds the bound; about 120,000 tokens would tell"]),
        (SHORT, 10, ["prose has 1 of 16 windows", "184 of 2,000 predicted", "--tokens"]),
        ({"increase": 0.02, "lower": 0.01, "upper": 0.03}, 10, ["lies on the bound"]),
    ],
)
def test_the_table_ends_with_the_verdict_and_what_to_try_next(validated, changes, code, said):
    ended, shown, _ = validated(prose=FIGURES | changes)
    assert ended == code
    for text in said:
        assert text in shown.out


def test_the_table_has_every_figure_of_every_text(validated):
    _, shown, _ = validated(data=FIGURES | SHORT | {"first_difference": None}, prose=FIGURES)
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert "candidate tiny [W4A16] (Q4_1, run with --quantization auto, KV cache int8, cpu)" in lines
    for line in (
        "your data prose",
        "perplexity of the base 10.000 10.000",
        "perplexity of the candidate 10.100 10.100",
        "increase +1.00% +1.00%",
        "95 % interval of the increase none +0.50% to +1.50%",
        "KL divergence in nats, mean 0.0123 0.0123",
        "KL divergence, 99th percentile 0.2500 0.2500",
        "same likeliest token 95.1% 95.1%",
        "same greedy answers, up to 64 tokens 6 of 8 6 of 8",
        "earliest difference among them none token 12",
        "tokens predicted 184 in 1 windows 30,000 in 60 windows",
    ):
        assert line in lines
    assert "candidate: predicting (prose)" in shown.err


def test_json_has_the_verdict_and_the_same_figures(validated):
    code, shown, _ = validated("--json", "--max-perplexity-increase", "0.5%")
    found = json.loads(shown.out)
    assert (code, found["verdict"], found["max_perplexity_increase"]) == (10, "undecided", 0.005)
    assert found["texts"] == {"prose": FIGURES}
    assert found["base"] == found["candidate"] == SIDE


def test_the_base_has_ended_before_the_candidate_is_started_and_nothing_is_left(validated, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "mine.jsonl").write_text("{}")
    options = ["--data", str(tmp_path / "mine.jsonl"), "--tokens", "99", "--runner", "cpu", "--num-threads", "1"]
    _, _, told = validated(*options, "--quantization", "auto", "--kv-cache-dtype", "float16")
    looked, _, base, base_ended, candidate, _ = told
    shared = ["--runner", "cpu", "--num-threads", "1"]
    own = ["--model", "small", "--quantization", "auto", "--kv-cache-dtype", "float16"]
    assert base[:2] == ["validate-base", ["--model", "large", "--quantization", "none", *shared]]
    assert base_ended[0] == "validate-base"
    assert looked == candidate == ["validate-candidate", own + shared, base[2]]
    assert base[2].items() > {"data": str(tmp_path / "mine.jsonl"), "num_tokens": 99}.items()
    assert list(tmp_path.glob("paceline-validate-*")) == []


@pytest.mark.parametrize(("exit_code", "expected"), [(3, 3), (2, 2), (7, 7), (1, 70), (-9, 70)])
def test_an_executor_that_fails_says_why_and_its_code_is_no_verdict(validated, exit_code, expected):
    code, shown, told = validated(failing={"validate-base": exit_code})
    how = f"ended with exit code {exit_code}" if exit_code > 0 else "was killed by signal 9"
    assert shown.err.splitlines()[-1] == f"error: base {how}: it is damaged"
    assert code == expected
    assert [role for role, *_ in told] == [*LOOKED, "validate-base"]


def test_a_candidate_that_cannot_be_read_is_told_before_the_base_is_loaded(validated):
    code, shown, told = validated(failing={"validate-candidate": 3})
    assert shown.err.splitlines()[-1] == "error: candidate ended with exit code 3: it is damaged"
    assert (code, [role for role, *_ in told]) == (3, ["validate-candidate"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_nothing_is_left(validated, tmp_path, monkeypatch, number):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, shown, told = validated(failing={"validate-base": 0}, signal_number=number)
    assert (code, shown.out) == (128 + number, "")
    assert [role for role, *_ in told] == [*LOOKED, "validate-base"]
    assert list(tmp_path.glob("paceline-validate-*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-perplexity-increase", "-1"], "is not a percentage"),
        (["--max-perplexity-increase", "two"], "is not a percentage"),
        (["--data", "/nowhere/data.txt"], "does not exist"),
        (["--data", "/"], "is a directory"),
        (["--tokens", "0"], "greater than or equal to 64"),
    ],
)
def test_wrong_use_is_a_sentence_and_code_2(validated, arguments, message):
    code, shown, told = validated(*arguments)
    assert (code, told) == (2, [])
    assert message in " ".join(shown.err.replace("│", " ").split())
