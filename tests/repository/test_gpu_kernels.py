"""`make gpu-kernels`, as far as it can be shown without a GPU: what it says, counts, reads and makes of its figures."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

import gpu.__main__ as gpu_program
import gpu_kernels.__main__ as program
from gpu_kernels import config, missing_modules, run, timing
from gpu_kernels.anchors import Anchor, AnchorKey, Anchors, AnchorTable, MeasurementError, read_anchors
from gpu_kernels.case import Bound, Case, Place, Scale, Work
from gpu_kernels.cases import cases
from gpu_kernels.device_tests import Ran, run_tests
from gpu_kernels.measure import WrongResultError, check, measure
from gpu_kernels.results import Ceilings, Failure, Result, Timing
from gpu_kernels.table import line, summary
from gpu_kernels.targets import TARGETS, Measure, Target
from repository_checks.sources import ROOT

ON_PAPER = Place(torch.device("cpu"), torch.bfloat16)
NO_ANCHORS = Anchors({})


def all_cases(scale=Scale.FULL):
    """Every case; none of their tensors is made."""
    return list(cases(scale, ON_PAPER))


def case_of(op="silu", shape=None, *, error=0.0, theirs=None, **changed):
    """A case that computes nothing and moves 4 MB. error: whatever the way of a call, or by it."""
    work = Work(lambda: None, theirs, error if callable(error) else lambda way: error)
    case = Case(op, shape or {}, lambda seed: work, num_bytes=4_000_000, allowed_error=0.1)
    return dataclasses.replace(case, **changed)


def result_of(case, us, *, torch_us=None, anchor_us=None, fp8_tflops=None):
    """The case timed on a GPU that copies 4 TB/s."""
    theirs = None if torch_us is None else Timing(torch_us, 0.0)
    anchor = None if anchor_us is None else Anchor("stack", anchor_us)
    return Result(case, Timing(us, 0.0), theirs, anchor, Ceilings(4.0, 800.0, fp8_tflops))


@pytest.fixture
def rehearsed(monkeypatch, capsys):
    """Rehearses some cases; returns the exit code and what was printed."""

    def rehearse(*some, deadline=float("inf"), words=()):
        monkeypatch.setattr(run, "cases", lambda scale, place: iter(some))
        code = run.Run(NO_ANCHORS, None, deadline, words).rehearsed()
        return code, capsys.readouterr().out

    return rehearse


@pytest.mark.parametrize(("name", "main"), [("gpu-kernels", program.main), ("gpu", gpu_program.main)])
def test_without_a_gpu_or_torch_one_line_says_so(name, main, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out == f"{name}: nothing ran, torch {torch.__version__} finds no CUDA device here\n"
    monkeypatch.setattr(config, "_MODULES", ("torch", "no_such_module"))
    assert main([]) == 0
    assert capsys.readouterr().out.endswith(" has no no_such_module\n")


@pytest.mark.slow
def test_a_rehearsal_checks_every_operation_on_the_cpu(tmp_path):
    folders = (ROOT / each for each in ("kernels", "tests/bench", "tests/support", "executor"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-m", "gpu_kernels", "--rehearse", "--json", str(tmp_path / "figures.json")]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert "FAILED" not in shown
    assert {result["op"] for result in figures["results"]} == {case.op for case in all_cases(Scale.ODD)}
    assert {case.op for case in all_cases()} <= {case.op for case in all_cases(Scale.ODD)}


def test_least_bytes_and_operations_are_those_of_the_shape():
    """By hand: 8 KV heads and 32 query heads of 128, two bytes a number, one where it says fp8."""
    counts = {case.name: (case.num_bytes, case.num_flops) for case in all_cases()}
    keys_and_values, queries = 2 * 64 * 8192 * 8 * 128, 64 * 32 * 128
    assert counts["decode attention b 64 ctx 8192 bfloat16"] == (
        2 * keys_and_values + 4 * queries,
        4 * 64 * 8192 * 32 * 128,
    )
    assert counts["decode attention b 64 ctx 8192 fp8"][0] == keys_and_values + 4 * queries
    assert counts["prefill attention b 1 ctx 8192 bfloat16"][1] == 4 * (8192 * 8193 // 2) * 32 * 128
    weights, activations = 4096 * 6144, 16 * (4096 + 6144)
    assert counts["scaled linear m 16 n 6144 k 4096 fp8"] == (weights + 2 * activations, 2 * 16 * weights)
    assert counts["add + norm tokens 4096 width 4096"][0] == 4 * 4096 * 4096 * 2
    assert counts["rope + kv tokens 4096 fp8"][0] == 4096 * 128 * (2 * (2 * 32 + 2 * 8) + 2 * 8 + 4)
    assert counts["sample rows 256 vocab 128256 greedy"][0] == 256 * 128_256 * 4
    expert = 3 * 2048 * 768  # of 30B-A3B, of which a token has 8
    assert counts["experts t 1 30B-A3B bfloat16"] == (2 * 8 * expert + 2 * 2048 * 2, 2 * 8 * expert)


@pytest.mark.parametrize("scale", [Scale.QUICK, Scale.FULL])
def test_every_target_is_about_a_case_that_is_measured(scale):
    """A typing error in a target would otherwise never be missed; one about anchors needs a case that has a key."""
    for target in TARGETS:
        measured = [case for case in all_cases(scale) if target.applies(result_of(case, 1.0))]
        assert measured, target
        assert target.measure is not Measure.ANCHOR or any(case.anchor for case in measured), target


def test_the_fastest_anchor_of_a_shape_counts(tmp_path):
    attention = "num_heads,num_key_value_heads,head_dim,kv_cache_dtype,latency_us"
    lines = ["stack,gemm_dtype,m,n,k,latency_us", "a,fp8,1,8,4,9.5", "b,fp8,1,8,4,7.5", "c,fp8_block,1,8,4,6"]
    tables = {
        "gemm": "\n".join([*lines, "d,int8,1,8,4,1"]),
        "decode_attention": f"stack,batch_size,context,{attention}",
        "prefill_attention": f"stack,batch_size,isl,{attention}",
    }
    for name, text in tables.items():
        (tmp_path / f"h200_{name}.csv").write_text(text, encoding="utf-8")
    anchors = read_anchors(tmp_path)
    assert anchors.best(AnchorKey(AnchorTable.GEMM, ("fp8",), (1, 8, 4))) == Anchor("b", 7.5)
    assert anchors.best(AnchorKey(AnchorTable.GEMM, ("fp8", "fp8_block"), (1, 8, 4))) == Anchor("c", 6.0)
    assert anchors.best(AnchorKey(AnchorTable.GEMM, ("fp8",), (2, 8, 4))) is None
    assert read_anchors(None) == NO_ANCHORS


def test_anchors_that_are_not_there_or_no_table_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert program.main(["--anchors", str(tmp_path)]) == 2
    assert "h200_gemm.csv cannot be read" in capsys.readouterr().err
    (tmp_path / "h200_gemm.csv").write_text("stack,m\na,1\n", encoding="utf-8")
    with pytest.raises(MeasurementError, match="is no table of stack, gemm_dtype, m, n, k, latency_us"):
        read_anchors(tmp_path)


def test_a_line_shows_rate_limit_ratios_and_targets():
    """4 MB in 2 us are 2 TB/s, half of a copy; torch takes twice as long, the anchor half. Lines fit a terminal."""
    shown = line(result_of(case_of("silu", {"tokens": 4096}), 2.0, torch_us=4.0, anchor_us=1.0))
    assert " ".join(shown.split()) == "silu tokens 4096 2.00 2 TB/s 50% 2.00 0.50 >= 0.85 of a copy: missed"
    failed = line(Failure(case_of("silu", {"tokens": 1}), "it broke"))
    assert " ".join(failed.split()) == "silu tokens 1 FAILED: it broke"
    predicted = line(result_of(case_of("silu", {"tokens": 1}, predicted="3.0 us by its bytes"), 2.0))
    assert predicted.endswith("  predicted: 3.0 us by its bytes")
    lines = [line(result_of(case, 98_765.4, torch_us=1e6, anchor_us=1e6)) for case in all_cases()]
    assert max(len(re.split("  >=|  <=|  predicted", text)[0]) for text in lines) <= 96


def test_products_of_float8_have_a_limit_of_their_own():
    case = case_of(bound=Bound.FP8_PRODUCTS, num_flops=10**9)
    result = result_of(case, 1.0, fp8_tflops=1250.0)
    assert (result.rate, result.share_of_ceiling, case.bound.unit) == (1000.0, 0.8, "TFLOP/s")
    assert result_of(case, 1.0).share_of_ceiling is None


def test_a_summary_says_how_often_a_target_is_reached_and_where_it_is_missed_most():
    target = Target("op", Measure.ANCHOR, 1.5, {"m": (1, 16)})
    results = [
        result_of(case_of("op", {"m": 1}), 1.0, anchor_us=2.0),
        result_of(case_of("op", {"m": 4}), 1.0, anchor_us=1.0),
        result_of(case_of("op", {"m": 8}), 1.0, anchor_us=1.4),
        result_of(case_of("op", {"m": 16}), 1.0),
        result_of(case_of("op", {"m": 64}), 1.0, anchor_us=0.1),
        Failure(case_of("op", {"m": 2}), "it broke"),
    ]
    assert list(summary(results, [target])) == [
        "op (m 1-16) >= 1.5 x of the best anchor: reached at 1 of 3 shapes, least at m 4 (1); 1 have no anchor"
    ]
    assert list(summary([], [target])) == ["op (m 1-16) >= 1.5 x of the best anchor: not measured"]
    time = Target("op", Measure.US, 60)
    assert [time.is_reached(result_of(case_of("op"), us)) for us in (59.0, 61.0)] == [True, False]


@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_a_wrong_result_is_not_timed(error):
    with pytest.raises(WrongResultError, match=r"allowed are 0\.1"):
        check(case_of(error=error))


def test_what_a_replay_leaves_is_checked_too():
    clock = timing.RehearsalClock()
    case = case_of(error=lambda way: float(way == clock.replayed))
    with pytest.raises(WrongResultError, match="the error is 1"):
        measure(case, clock, Ceilings(4.0, 800.0), NO_ANCHORS)


def test_a_case_that_fails_fails_the_run_and_not_the_other_cases(rehearsed):
    code, shown = rehearsed(case_of("wrong", error=1.0), case_of("right"))
    assert code == 1
    assert "FAILED: WrongResultError the error is 1" in shown
    assert "right " in shown


def test_what_torch_cannot_do_is_no_failure(rehearsed):
    def runs_out_of_memory():
        raise MemoryError

    code, shown = rehearsed(case_of(theirs=runs_out_of_memory))
    assert code == 0
    assert "1.00" in shown.split("(torch: MemoryError)")[0]


def test_a_case_that_could_not_be_measured_in_time_is_said_and_fails_the_run(rehearsed):
    code, shown = rehearsed(case_of(), case_of(), deadline=0.0)
    assert code == 1
    assert "2 cases were left out: the time was up" in shown


def test_only_operations_that_are_asked_for_are_measured(rehearsed):
    code, shown = rehearsed(case_of("one"), case_of("two"), words=["tw"])
    assert (code, "two" in shown, "one" in shown) == (0, True, False)
    code, shown = rehearsed(case_of("one"), case_of("two"), words=["three"])
    assert code == 1
    assert "no operation has three in its name: there are one, two" in shown


def test_calls_take_turns_and_the_median_counts(monkeypatch):
    log = []

    def measured(calls, rep, quantiles):
        calls()
        return [1.0, 2.0, 2.5]  # ms, of the quartiles

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "do_bench_cudagraph", measured)
    assert timing.CudaClock().time([lambda: log.append(1), lambda: log.append(2)]) == Timing(us=100.0, spread=0.75)
    assert log == [1, 2] * 10


def test_the_ceiling_of_memory_is_what_a_kernel_reads_and_writes(monkeypatch):
    """500,000 bytes each in 1 us, and no `copy_`, which is no kernel in a graph."""
    add = Mock(wraps=torch.add)
    monkeypatch.setattr(torch, "add", add)
    reached = timing.ceilings(timing.RehearsalClock(), ON_PAPER, copy_bytes=500_000, size=8)
    assert reached.copy_tbps == 1.0
    assert add.call_count == 1


def test_a_run_on_a_gpu_tests_checks_times_and_sums_up(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(run, "Place", lambda device, dtype, has_fp8: ON_PAPER)
    monkeypatch.setattr(run, "CudaClock", timing.RehearsalClock)
    monkeypatch.setattr(run, "ceilings", lambda clock, place: Ceilings(4.3, 790.0))
    monkeypatch.setattr(run, "cases", lambda scale, place: iter([case_of(scale.name)]))
    monkeypatch.setattr(run, "run_tests", lambda timeout_s: Ran(is_good=False, report="3 failed"))
    anchors = Anchors({(AnchorTable.GEMM, "fp8", (1, 1, 1)): Anchor("stack", 1.0)})
    assert run.Run(anchors, None, deadline=float("inf")).on_gpu(Scale.QUICK, with_tests=True) == 1
    shown = capsys.readouterr().out
    parts = ["3 failed", "A100", "measured on an H200", "4.30 TB/s", "QUICK ", "silu (tokens 4096)", "1 odd shapes"]
    assert [shown.find(part) for part in parts] == sorted(shown.find(part) for part in parts)
    assert all(part in shown for part in parts)


def test_tests_run_with_what_is_installed(tmp_path):
    fails, hangs = tmp_path / "fails" / "test_fails.py", tmp_path / "hangs" / "test_hangs.py"
    for file, text in ((fails, "def test_fails():\n    assert False\n"), (hangs, "import time\ntime.sleep(600)\n")):
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
    failed, ended = run_tests(fails.parent, timeout_s=120), run_tests(hangs.parent, timeout_s=1)
    assert not failed.is_good
    assert "1 failed" in failed.report
    assert ended == Ran(is_good=False, report="test_hangs.py: not done after 1 s\n")
    with pytest.raises(pytest.skip.Exception, match=r"llvmlite\.ir is not installed here"):
        missing_modules._Missing(["llvmlite"]).find_spec("llvmlite.ir")
    assert missing_modules._Missing(["llvmlite"]).find_spec("torch") is None
