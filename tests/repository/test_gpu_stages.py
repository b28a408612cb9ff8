"""`make gpu`, as far as it can be shown without a GPU: its stages on the CPU's twin of one, and what it makes of them.

The figures of a rehearsal mean nothing, and none is looked at.
"""

import json
import math
import re
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest

import gpu.__main__ as program
import paceline_executor
import paceline_scheduler
from gpu import bench_stage, cells, drafts_stage, e2e_stage, endurance, engine_side, ranks_stage, runner_stage
from gpu.bars import BARS, PEER_BARS, ratio, read_peer, table, verdicts
from gpu.bench_models import timed, write_config
from gpu.cells import FULL, TINY, spread_of
from gpu.config import compiling_into, stage_environment
from gpu.drafted_cells import tell_nothing_apart
from gpu.engine_cells import flops_of
from gpu.equality import GREEDY_ALONE, agrees
from gpu.errors import CheckFailedError, GpuRunError
from gpu.feed import limits_of, prompts_of
from gpu.invariance import Variants
from gpu.predictor import Predictor
from gpu.report import Figure, Report
from gpu.rigs import EXPERTS, LLAMA_8B, QWEN3_30B, find_place, make_feed, random_model, timed_numbers, uploaded
from gpu.stage import NEEDED, Stage, Task, run_stage
from gpu.wheels import install_wheels, missing_modules
from paceline.process.command import ExitCode
from paceline.process.options import default_cache_dir
from paceline_executor import version
from paceline_executor.start import kernel_compiling
from paceline_executor.weights.hf.config import read_hf_config
from process_groups import run_program
from random_models import MIXTURE_CONFIGS, TINY_CONFIG, RandomCheckpoint
from repository_checks.sources import ROOT


@pytest.fixture
def task(tmp_path, monkeypatch):
    """What a stage is asked in a rehearsal; its processes find the stages' modules."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/bench:{ROOT}/tests/support")
    return Task(tmp_path, time.monotonic() + 300, rehearses=True)


def report_in(task, name):
    """Makes the report of a stage, as `run_stage` does."""
    return lambda device: Report(task.folder / f"{name}.json", task.deadline, device)


def failures(report):
    return [check for check in report.checks if not check.is_good]


def test_the_runners_stage_passes_on_the_twin(task):
    report = runner_stage.work(task, report_in(task, "runner"))
    assert failures(report) == []
    assert report.left_out == []
    written = json.loads((task.folder / "runner.json").read_text(encoding="utf-8"))
    names = [check["name"] for check in written["checks"]]
    assert sum("the same bits" in name for name in names) == 12
    assert any("gemma3" in name for name in names)
    assert "tokens with drafts are the CPU's" in names


@pytest.mark.parametrize("numbers", ["float32", EXPERTS])
def test_the_engine_alone_fills_every_cell(task, numbers):
    report = engine_side.work(replace(task, numbers=numbers), report_in(task, "engine"))
    assert failures(report) == []
    all_cells = (*TINY.cells(), *TINY.engine_cells())
    wanted = [(what, shape) for cell in all_cells for what, shape, _ in TINY.figures_of(cell)]
    assert [(figure.what, figure.shape) for figure in report.figures if figure.engine is not None] == wanted


@pytest.mark.slow
def test_the_stage_of_figures_fills_every_cell_from_both_sides(task, capsys):
    report = bench_stage.work(task, report_in(task, "bench"))
    assert failures(report) == []
    phases = [figure for figure in report.figures if figure.what == cells.START_PHASE]
    assert {"captures", "measuring"} <= {figure.shape for figure in phases}
    figures = {(one.what, one.shape): (one.engine, one.system) for one in report.figures if one not in phases}
    assert figures.pop((cells.START, ""))[1] > 0
    loading = [figures.pop(place)[0] for place in list(figures) if place[0] in (cells.LOADING, cells.LOADING_SHARE)]
    assert len(loading) == 3
    assert all(rate > 0 for rate in loading)
    for some, wanted in ((TINY.cells(), [True, True]), (TINY.engine_cells(), [True, False])):
        for what, shape, _ in (figure for cell in some for figure in TINY.figures_of(cell)):
            assert [side is not None for side in figures.pop((what, shape))] == wanted
    assert figures == {}
    assert "started in: listening" in capsys.readouterr().out


def test_the_stage_of_drafts_fills_every_cell(task):
    report = drafts_stage.work(task, report_in(task, "drafts"))
    assert failures(report) == []
    num_modelled, num_acceptances = 2 * len(TINY.modelled), len(cells.ACCEPTANCES)
    of_each = (len(TINY.drafted) + num_modelled) * (3 + 2 * num_acceptances)
    best = num_acceptances * (len({rows for rows, _ in TINY.drafted}) + num_modelled // len(TINY.modelled))
    assert len(report.figures) == of_each + best
    assert all(figure.engine is not None for figure in report.figures)


@pytest.mark.slow
def test_the_stage_of_ranks_passes_on_the_cpu(task):
    report = ranks_stage.work(task, report_in(task, "ranks"))
    assert failures(report) == []
    assert len(report.checks) == 8


@pytest.mark.soak
def test_the_stage_of_the_whole_system_passes_on_the_twin(task):
    assert failures(e2e_stage.work(task, report_in(task, "e2e"))) == []


@pytest.mark.parametrize(
    "drafter", ["", *(pytest.param(each, marks=pytest.mark.slow) for each in (cells.MODEL, cells.HEAD))]
)
def test_drafts_of_a_script_are_right_as_often_as_it_says(drafter):
    """Every draft of an acceptance of 1, none of 0; tokens are those of steps without drafts. Whoever drafts before."""
    place, what = find_place(rehearses=True), timed(rehearses=True)
    model = random_model(place, what.config, "float32", what.drafted_limits().max_model_len)
    tell_nothing_apart(model)
    drafted = drafts_stage.scripted_cells(place, what, "float32", model, {}, drafter)
    assert {step.num_output for step in drafted._steps(2, 0)} == {2}
    for acceptance, num_tokens in ((1.0, 4), (0.0, 1)):
        drafted._write(acceptance)
        assert {step.num_output for step in drafted._steps(2, 3)} == {2 * num_tokens}


@pytest.mark.parametrize("spoil", [lambda logits: logits.roll(1, dims=1), lambda logits: logits * math.nan])
def test_tokens_that_are_not_the_cpus_are_found(monkeypatch, spoil):
    logits = Predictor.logits
    monkeypatch.setattr(Predictor, "logits", lambda *text: spoil(logits(*text)))
    with pytest.raises(CheckFailedError, match="of 12 tokens are the CPU's choice"):
        agrees(find_place(rehearses=True), TINY_CONFIG, GREEDY_ALONE, 2)


def test_a_mixture_of_other_experts_is_found():
    """Though tokens that are far off may be those whose experts rounding decides."""
    place, config = find_place(rehearses=True), MIXTURE_CONFIGS["qwen3moe"]

    def feed_of(checkpoint, limits):
        experts = replace(config.experts, routing=replace(config.experts.routing, top_k=2))
        other = RandomCheckpoint(replace(config, experts=experts))
        return make_feed(place, uploaded(place, other, limits.max_model_len), config, limits)

    with pytest.raises(CheckFailedError, match="tokens are the CPU's choice"):
        agrees(place, config, GREEDY_ALONE, 2, feed_of=feed_of)


def test_bits_that_differ_are_found():
    variants = Variants(find_place(rehearses=True), "float32", 4)
    tokens, numbers = variants._alone[1]
    variants._alone[1] = (tokens, bytes(len(numbers)))
    with pytest.raises(CheckFailedError, match="stream 1 has the same tokens, and other log-probabilities"):
        variants.compare("with batch mates")
    variants._alone[1] = ([*tokens[:-1], tokens[-1] + 1], numbers)
    with pytest.raises(CheckFailedError, match="stream 1 has the tokens"):
        variants.compare("taken over")


def test_memory_that_grows_is_found(monkeypatch):
    for growth in ((0.0, 20.0), (2.0, 0.0)):
        readings = iter([(1.0, 100.0), (1.0 + growth[0], 100.0 + growth[1])])
        monkeypatch.setattr(endurance, "_memory_mib", lambda _, readings=readings: next(readings))
        with pytest.raises(CheckFailedError, match="MiB of the host"):
            endurance.goes_on(find_place(rehearses=True), 2, 20)


def test_a_feed_that_is_taken_over_notices_what_rows_say():
    place = find_place(rehearses=True)
    limits = limits_of(TINY_CONFIG, 2, 32)
    model = random_model(place, TINY_CONFIG, "float32", 32)
    feed = make_feed(place, model, TINY_CONFIG, limits)
    stream = feed.add(prompts_of(TINY_CONFIG, [5])[0], 12)
    feed.run(until=lambda: len(stream.output) > 4)
    stream.output[0] += 1
    with pytest.raises(CheckFailedError, match=r"row \d says that it generated"):
        feed.take_over()


def test_a_failure_does_not_end_a_stage(tmp_path, capsys):
    report = Report(tmp_path / "x.json", math.inf, "none")

    def fails():
        raise ValueError("of the test")

    report.check("first", fails)
    report.check("second", lambda: "seen")
    report.deadline = 0.0
    report.check("third", fails)
    assert [check.is_good for check in report.checks] == [False, True]
    assert not report.is_good
    assert report.left_out == ["third: the time was up"]
    assert "FAILED first: ValueError: of the test" in capsys.readouterr().out
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["is_good"] is False


def test_bars_are_judged_by_each_side():
    """By hand: 4.36 ms and 3 %; a peer's 4.922 ms over ours; tokens per second the other way round."""
    decode = Figure("bf16", cells.DECODE, cells.ROWS.format(1, 512), "ms", engine=4.4, system=4.6)
    assert list(verdicts(decode, 4.922)) == [
        "<= 4.491: engine reached, system missed",
        "<= 1.03 x engine: system missed",
        ">= 1.05 x peer: engine reached, system reached",
    ]
    assert ratio(decode, 4.4, 4.84) == pytest.approx(1.1)
    rate = Figure("fp8", cells.THROUGHPUT.format(256), "128 in 128 out", "output tok/s", system=22_000)
    assert ratio(rate, 22_000, 20_000) == pytest.approx(1.1)
    assert list(verdicts(rate, 20_286)) == [">= 1.1 x peer: system missed"]
    assert list(verdicts(Figure("bf16", cells.IDLE, "any", "%", engine=0.0), None)) == ["<= 1: engine reached"]


def test_every_bar_is_about_a_cell_that_is_measured():
    """A typing error would otherwise never be missed."""
    (num_rows,) = {num_rows for num_rows, _ in FULL.modelled}
    measured = {
        cells.DECODE: {cells.ROWS.format(*decode) for decode in FULL.decodes},
        cells.MIXED.format(FULL.mixed_prompt): {cells.ROWS.format(*decode) for decode in FULL.mixed},
        cells.PREFILL_RATE: {f"tokens {prompt}" for prompt in FULL.prompts},
        cells.VERIFY_COST: {cells.drafts_at(*cell) for cell in FULL.drafted},
        cells.BEST_SPEEDUP.format(0.8): {cells.drafting_rows(num_rows, kind) for kind in (cells.MODEL, cells.HEAD)},
        cells.LOADING: {"from the page cache"},
    }
    gaps = (
        cells.GAP.format(FULL.arrival_rows, FULL.arrivals[0]),
        cells.GAP_SPREAD.format(FULL.arrival_rows, FULL.arrivals[1]),
    )
    shapeless = {
        cells.IDLE,
        cells.START,
        cells.WARM_START,
        cells.LOADING_SHARE,
        *gaps,
        *map(cells.SPEEDUP_SHARE.format, cells.ACCEPTANCES),
    }
    assert {bar.what for bar in BARS} == {*measured, *shapeless}
    for bar in BARS:
        assert bar.shape in measured.get(bar.what, {""}), bar
    for what in (cells.DECODE, cells.MIXED.format(FULL.mixed_prompt), cells.BEST_SPEEDUP.format(0.8)):
        assert {bar.shape for bar in BARS if bar.what == what} == measured[what]
    assert set(PEER_BARS) == {cells.DECODE, cells.THROUGHPUT.format(FULL.num_requests), cells.PREFILL}


def test_numbers_that_a_device_has_not_are_refused():
    """A run that timed nothing would have passed."""
    place = find_place(rehearses=True)
    assert timed_numbers(place, None) == timed_numbers(place, "float32") == ["float32"]
    with pytest.raises(GpuRunError, match="has no fp8: there is float32"):
        timed_numbers(place, "fp8")


def test_figures_are_what_their_names_say():
    """By hand. Gaps of 1 to 100 have the 99th hundredth over the median. A prompt of 2,048 tokens takes two operations
    per weight and token, half a square of pairs, and one row of logits.
    """
    assert spread_of([float(gap) for gap in range(1, 101)]) == pytest.approx(99.99 / 50.5)
    assert spread_of([1.0]) == 0.0
    weights = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    attention = 4 * (2048 * 2049 / 2) * 32 * 128 * 32
    assert flops_of(LLAMA_8B, 2048) == 2.0 * weights * 2048 + attention + 2.0 * 128256 * 4096
    weights = 48 * (2048 * (4096 + 512) * 2 + 8 * 3 * 2048 * 768)  # of 8 experts of 128
    attention = 4 * sum(range(2049)) * 32 * 128 * 48
    assert flops_of(QWEN3_30B, 2048) == 2.0 * weights * 2048 + attention + 2.0 * 151_936 * 2048


def test_an_executor_reads_the_mixture_that_is_timed(tmp_path):
    tiny = timed(rehearses=True, numbers=EXPERTS).config
    for name, config in (("full", QWEN3_30B), ("tiny", tiny)):
        (tmp_path / name).mkdir()
        assert read_hf_config(write_config(config, tmp_path / name, EXPERTS) / "config.json") == config


def test_a_system_that_starts_with_nothing_compiled_finds_nothing(tmp_path):
    environment = compiling_into(tmp_path)
    assert default_cache_dir(environment) == tmp_path
    assert Path(environment["TRITON_CACHE_DIR"]) == tmp_path / kernel_compiling._FOLDER


def test_a_peers_file_fills_the_table(tmp_path):
    path = tmp_path / "peer.csv"
    lines = ["numbers,what,shape,unit,value", f"bf16,{cells.DECODE},rows 1 context 512,ms,4.922", "bf16,x,y,ms,4.9/5.3"]
    path.write_text("\n".join(lines), encoding="utf-8")
    peers = read_peer(path)
    assert peers == {("bf16", cells.DECODE, "rows 1 context 512"): 4.922}
    _, line = table([Figure("bf16", cells.DECODE, "rows 1 context 512", "ms", engine=4.0)], peers)
    assert line.split(")")[1].split()[:3] == ["4", "4.922", "1.23"]
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(GpuRunError, match="is no table of numbers, what, shape, unit, value"):
        read_peer(path)
    with pytest.raises(GpuRunError, match="cannot be read"):
        read_peer(tmp_path / "none.csv")


@pytest.fixture
def run_stages(tmp_path, monkeypatch, capsys):
    """Runs these programs in place of stages. Returns the exit code, the outcomes, and what is in the stages' files."""

    def run(programs, *options):
        monkeypatch.setattr(program, "_command_of", lambda stage, _: [sys.executable, "-c", programs[stage.value]])
        code = program.main(["--rehearse", "--out", str(tmp_path), "--stages", ",".join(programs), *options])
        said = capsys.readouterr().out.partition("== outcome\n")[2].splitlines()[: len(programs)]
        files = {name: json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in programs}
        return code, said, files

    return run


def test_stages_run_in_order_and_one_that_fails_fails_the_run(run_stages):
    code, said, files = run_stages({"e2e": "", "runner": "raise SystemExit(1)", "kernels": ""})
    assert code == 1
    outcomes = [tuple(line.split()[:2]) for line in said]
    assert outcomes == [("kernels", "passed"), ("runner", "failed"), ("e2e", "passed")]
    assert all(files[name]["outcome"].startswith(outcome) for name, outcome in outcomes)
    assert run_stages({"kernels": ""})[0] == 0
    with pytest.raises(SystemExit, match="2"):
        program.main(["--stages", "speed"])


def test_what_is_interrupted_says_where_the_rest_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(program, "run_program", Mock(side_effect=KeyboardInterrupt))
    assert program.main(["--rehearse", "--out", str(tmp_path), "--stages", "kernels"]) == 1
    assert f"gpu: interrupted, what was found is in {tmp_path}" in capsys.readouterr().err


def test_what_could_not_be_measured_is_said_and_fails_the_run(tmp_path, capsys, monkeypatch, run_stages):
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path), "--seconds", "0"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def work(task, report_on):
        report = report_on("none")
        report.check("a row", lambda: "seen")
        return report

    assert run_stage("bench", work) == 1
    assert "bench: not measured: a row: the time was up" in capsys.readouterr().out
    file = tmp_path / "bench.json"
    written = file.read_text(encoding="utf-8")
    code = f"import pathlib; pathlib.Path({str(file)!r}).write_text({written!r}); raise SystemExit(1)"
    code, said, _ = run_stages({"bench": code})
    assert code == 1
    assert "passed, but 1 could not be measured" in said[0]


def test_a_stage_that_wrote_nothing_in_its_time_leaves_no_figures_of_an_earlier_run(tmp_path, run_stages):
    (tmp_path / "bench.json").write_text('{"is_good": true, "figures": [1]}', encoding="utf-8")
    code, _, files = run_stages({"bench": "import time; time.sleep(600)"}, "--seconds", "0.1")
    assert code == 1
    assert files["bench"] == {"is_good": False, "outcome": "was ended after 0 s"}


def test_a_stage_whose_modules_are_missing_says_which_wheels_it_needs(monkeypatch, run_stages):
    monkeypatch.setitem(NEEDED, Stage.KERNELS, ("no_such_module",))
    code, said, _ = run_stages({"kernels": ""})
    assert code == 1
    assert "this Python has no no_such_module; put their wheels into the folder of WHEELS=" in said[0]


def test_a_checkout_travels_at_once():
    """To a machine without a network, which may be far: at most 64 MiB at a time, wheels by themselves."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert sum((ROOT / name).lstat().st_size for name in tracked.split("\0") if name) < 64 * 2**20


def test_wheels_of_a_folder_are_found_by_stages(tmp_path):
    with pytest.raises(GpuRunError, match="has no wheels"):
        install_wheels(tmp_path, tmp_path / "site")
    with zipfile.ZipFile(tmp_path / "of_a_test-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("of_a_test.py", "X = 1\n")
        wheel.writestr("of_a_test-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: of_a_test\nVersion: 1.0\n")
        wheel.writestr("of_a_test-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any")
        wheel.writestr("of_a_test-1.0.dist-info/RECORD", "")
    install_wheels(tmp_path, tmp_path / "site")
    modules = ("of_a_test", "numpy", "no_such_module")
    assert missing_modules(modules, stage_environment(tmp_path, tmp_path / "site")) == ["no_such_module"]
    assert missing_modules(modules, stage_environment(tmp_path, None)) == ["of_a_test", "no_such_module"]


def test_services_of_a_checkout_that_nobody_installed_have_a_version(monkeypatch):
    def unknown(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", unknown)
    assert version.this_version.__wrapped__() == "checkout"


def test_a_machine_with_a_gpu_needs_no_compiler_for_cpus(tmp_path):
    """Neither for kernels, system and figures, nor for an executor: the newest numpy is too new for it."""
    code = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import gpu.engine_side, gpu.bench_stage, gpu.e2e_stage, gpu.drafts_stage, gpu_kernels.run
import paceline_executor.process, paceline_executor.start.loading_device
from paceline_executor.__main__ import main
main(["--runner", "cuda", "--port", "0", "--health-port", "0", "--metrics-port", "off"])
"""
    assert run_program([sys.executable, "-c", code], stage_environment(tmp_path, None)).code == ExitCode.MACHINE


@pytest.mark.parametrize("program", [paceline_executor, paceline_scheduler])
def test_a_stage_has_what_its_programs_ask_for(program):
    source = (Path(program.__file__).parent / "__main__.py").read_text(encoding="utf-8")
    asked = {name for call in re.findall(r"check_installed\(_PROGRAM, (.*)\)", source) for name in call.split(", ")}
    asked = {name.strip('"') for name in asked} - {"torch", "numpy", "numba"}
    assert {"structlog", "prometheus_client"} <= asked <= {*NEEDED[Stage.E2E]}
