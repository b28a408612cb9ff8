"""`make gpu-kernels`, as far as it can be shown without a GPU: what it says, counts, reads and makes of its figures."""

import ast
import contextlib
import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch
import triton

import gpu_kernels.__main__ as program
from gpu_kernels import missing_modules, run
from gpu_kernels.anchors import Anchor, AnchorKey, Anchors, AnchorTable, read_anchors
from gpu_kernels.case import Bound, Case, Place, Scale, Work
from gpu_kernels.cases import cases
from gpu_kernels.device_tests import Ran, run_tests
from gpu_kernels.errors import AnchorError, WrongResultError
from gpu_kernels.measure import check, measure
from gpu_kernels.results import Ceilings, Failure, Result, Timing
from gpu_kernels.table import line, summary
from gpu_kernels.targets import TARGETS, Measure, Target
from gpu_kernels.timing import CudaClock, RehearsalClock, ceilings

REPOSITORY = Path(__file__).resolve().parents[3]
ON_PAPER = Place(torch.device("cpu"), torch.bfloat16)


def all_cases():
    """Every case of a full run; none of their tensors is made."""
    return list(cases(Scale.FULL, ON_PAPER))


def case_of(op="silu", shape=None, *, error=0.0):
    """A case that computes nothing and moves 4 MB."""
    work = Work(ours=lambda: None, theirs=None, error=lambda way: error)
    return Case(op, shape or {}, Bound.MEMORY, 4_000_000, 0, lambda seed: work, allowed_error=0.1)


class FakeEvent:
    """Takes its time, in ms, from a list."""

    def __init__(self, clock):
        self.clock = clock

    def record(self):
        """Now."""
        self.ms = next(self.clock)

    def synchronize(self):
        """Nothing to wait for."""

    def elapsed_time(self, end):
        """From this one on."""
        return end.ms - self.ms


def result_of(case, us, *, torch_us=None, anchor_us=None):
    """The case timed on a GPU that copies 4 TB/s."""
    theirs = None if torch_us is None else Timing(torch_us, 0.0)
    anchor = None if anchor_us is None else Anchor("stack", anchor_us)
    return Result(case, Timing(us, 0.0), theirs, anchor, Ceilings(copy_tbps=4.0, product_tflops=800.0))


def test_without_a_gpu_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main([]) == 0
    assert capsys.readouterr().out == f"gpu-kernels: nothing ran, torch {torch.__version__} finds no CUDA device here\n"


def test_without_torch_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(program, "_MODULES", ("torch", "no_such_module"))
    assert program.main(["--quick"]) == 0
    assert capsys.readouterr().out.endswith(" has no no_such_module\n")


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled in this process")
def test_a_rehearsal_checks_every_operation_on_the_cpu(capsys, tmp_path):
    assert program.main(["--rehearse", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert "FAILED" not in capsys.readouterr().out
    assert {result["op"] for result in figures["results"]} == {case.op for case in all_cases()}


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


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("scale", [Scale.QUICK, Scale.FULL])
def test_every_target_is_about_a_case_that_is_measured(target, scale):
    """A typing error in a target would otherwise never be missed; one about anchors needs a case that has a key."""
    measured = [case for case in cases(scale, ON_PAPER) if target.applies(result_of(case, 1.0))]
    assert measured
    assert target.measure is not Measure.ANCHOR or any(case.anchor for case in measured)


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
    assert read_anchors(None) == Anchors({})


def test_anchors_that_are_not_there_or_no_table_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert program.main(["--anchors", str(tmp_path)]) == 2
    assert "h200_gemm.csv cannot be read" in capsys.readouterr().err
    (tmp_path / "h200_gemm.csv").write_text("stack,m\na,1\n", encoding="utf-8")
    with pytest.raises(AnchorError, match="is no table of stack, gemm_dtype, m, n, k, latency_us"):
        read_anchors(tmp_path)


def test_a_line_shows_rate_limit_ratios_and_targets():
    """4 MB in 2 us are 2 TB/s, half of a copy; torch takes twice as long, the anchor half."""
    shown = line(result_of(case_of("silu", {"tokens": 4096}), 2.0, torch_us=4.0, anchor_us=1.0))
    assert " ".join(shown.split()) == "silu tokens 4096 2.00 2 TB/s 50% 2.00 0.50 >= 0.85 of a copy: missed"
    failed = line(Failure(case_of("silu", {"tokens": 1}), "it broke"))
    assert " ".join(failed.split()) == "silu tokens 1 FAILED: it broke"


def test_lines_fit_a_terminal():
    lines = [line(result_of(case, 98_765.4, torch_us=1e6, anchor_us=1e6)) for case in all_cases()]
    assert max(len(text.split("  >=")[0].split("  <=")[0]) for text in lines) <= 96


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


def test_what_a_replay_leaves_is_checked_too():
    clock = RehearsalClock()
    work = Work(ours=lambda: None, theirs=None, error=lambda way: float(way == clock.replayed))
    case = dataclasses.replace(case_of(), build=lambda _: work)
    with pytest.raises(WrongResultError, match="the error is 1"):
        measure(case, clock, Ceilings(4.0, 800.0), Anchors({}))


def test_products_of_float8_have_a_limit_of_their_own():
    case = dataclasses.replace(case_of(), bound=Bound.FP8_PRODUCTS, num_flops=10**9)
    result = dataclasses.replace(result_of(case, 1.0), ceilings=Ceilings(4.0, 800.0, 1250.0))
    assert (result.rate, result.share_of_ceiling, case.bound.unit) == (1000.0, 0.8, "TFLOP/s")
    assert result_of(case, 1.0).share_of_ceiling is None


@pytest.mark.parametrize(("launched_us", "terabytes_per_second"), [(8.0, 1.0), (2.0, 2.0)])
def test_the_faster_of_two_copies_is_the_ceiling(monkeypatch, launched_us, terabytes_per_second):
    """A captured one of 500,000 bytes in 1 us, and one of four times as many that takes its time by itself."""
    monkeypatch.setattr(RehearsalClock, "launched_us", lambda clock, call: launched_us)
    assert ceilings(RehearsalClock(), ON_PAPER, copy_bytes=500_000, size=8).copy_tbps == terabytes_per_second


def test_less_time_is_better():
    target = Target("op", Measure.US, 60)
    assert [target.is_reached(result_of(case_of("op"), us)) for us in (59.0, 61.0)] == [True, False]


@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_a_wrong_result_is_not_timed(error):
    with pytest.raises(WrongResultError, match=r"allowed are 0\.1"):
        check(case_of(error=error))


def test_a_case_that_fails_fails_the_run_and_not_the_other_cases(capsys, monkeypatch):
    wrong, right = case_of("wrong", error=1.0), case_of("right")
    monkeypatch.setattr(run, "cases", lambda scale, place: iter([wrong, right]))
    assert run.Run(Anchors({}), None, deadline=float("inf")).rehearsed() == 1
    shown = capsys.readouterr().out
    assert "FAILED: WrongResultError the error is 1" in shown
    assert "right " in shown


def test_what_torch_cannot_do_is_no_failure(capsys, monkeypatch):
    def runs_out_of_memory():
        raise MemoryError

    work = Work(ours=lambda: None, theirs=runs_out_of_memory, error=lambda way: 0.0)
    monkeypatch.setattr(run, "cases", lambda scale, place: iter([dataclasses.replace(case_of(), build=lambda _: work)]))
    assert run.Run(Anchors({}), None, deadline=float("inf")).rehearsed() == 0
    assert "1.00" in capsys.readouterr().out.split("(torch: MemoryError)")[0]


def test_when_the_time_is_up_no_case_is_started(capsys, monkeypatch):
    monkeypatch.setattr(run, "cases", lambda scale, place: iter([case_of(), case_of()]))
    assert run.Run(Anchors({}), None, deadline=0.0).rehearsed() == 0
    assert "2 cases were left out" in capsys.readouterr().out


def test_calls_take_turns_in_a_replayed_graph_and_the_median_counts(monkeypatch):
    log, clock = [], iter([0, 2, *(edge for start in range(100, 2000, 40) for edge in (start, start + 2)), 5000, 5900])
    graph = types.SimpleNamespace(replay=lambda: log.append("replayed"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("warm"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda captured: contextlib.nullcontext(log.append("captured")))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(clock))
    measured = CudaClock().time([lambda: log.append(1), lambda: log.append(2)])
    assert log[:24] == [1, 2, "warm", "captured", *[1, 2] * 10]
    assert set(log[24:]) == {"replayed"}
    assert measured == Timing(us=1e3 * 2 / 20, spread=0.0)


def test_a_run_on_a_gpu_tests_checks_times_and_sums_up(capsys, monkeypatch):
    """In this order; with what a GPU would do left out."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(run, "Place", lambda device, dtype, has_fp8: ON_PAPER)
    monkeypatch.setattr(run, "CudaClock", RehearsalClock)
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
    (tmp_path / "test_fails.py").write_text("def test_fails():\n    assert False\n", encoding="utf-8")
    ran = run_tests(tmp_path, timeout_s=120)
    assert not ran.is_good
    assert "1 failed" in ran.report
    with pytest.raises(pytest.skip.Exception, match=r"llvmlite\.ir is not installed here"):
        missing_modules._Missing(["llvmlite"]).find_spec("llvmlite.ir")
    assert missing_modules._Missing(["llvmlite"]).find_spec("torch") is None


def imported_by(name):
    """The modules of ours and the others that importing a module imports: at its top, so not where they are needed."""
    folders = [REPOSITORY / folder / Path(*name.split(".")) for folder in ("kernels", "tests/bench")]
    files = [file for folder in folders for file in (folder / "__init__.py", folder.with_suffix(".py"))]
    for file in filter(Path.is_file, files):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_a_gpu_needs_no_compiler_for_cpus():
    """A machine with torch and Triton can run and measure every kernel: nothing on the way imports numba."""
    seen, left = set(), ["gpu_kernels.cases"]
    while left:
        name = left.pop()
        parents = [name.rpartition(".")[0]] if "." in name else []
        found = [other for other in (*parents, *imported_by(name)) if other not in seen]
        seen.update(found)
        left += found
    assert "paceline_kernels.attention.triton" in seen
    assert not {name for name in seen if name.split(".")[0] in ("numba", "llvmlite")}
