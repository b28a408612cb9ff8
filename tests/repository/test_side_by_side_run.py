"""The side-by-side run: drivers that answer, die and hang, engines that take turns, and what is said at the end."""

import json
import sys
import textwrap
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import side_by_side.__main__ as program
import side_by_side.run as run_module
from side_by_side.drivers.protocol import Answer, Facts, Request, UnsupportedError, Workload, run_steps
from side_by_side.engines import SEARCH_PATH, Engine, Environment, all_engines
from side_by_side.errors import EngineError, InstallError, RefusedError
from side_by_side.install import install
from side_by_side.machine import CpuTimes, Quiet, wait_until_quiet
from side_by_side.process import DriverProcess
from side_by_side.quality import measure_quality
from side_by_side.results import Limits

WORKLOAD = Workload((Request((1, 2, 3), 2), Request((4, 5, 6), 2)))
DRIVER = """
    import os, sys, time
    from side_by_side.drivers.protocol import Answer, Facts, UnsupportedError, reserve_stdout, serve
    channel = reserve_stdout()
    print("a library's own words")
    def run(workload):
        {body}
        return Answer([0.0, 0.0], [[0.1, 0.25]] * len(workload.requests))
    serve(channel, Facts("1.0", "fake", "none", (os.getpid(),)), run)
"""


@pytest.fixture
def start_driver(tmp_path):
    """Starts drivers whose engine does this, and ends what is left of them."""
    started = []

    def start(body="pass"):
        script = tmp_path / "driver.py"
        script.write_text(textwrap.dedent(DRIVER.format(body=body)))
        command, environment = [sys.executable, str(script)], {"PYTHONPATH": str(SEARCH_PATH)}
        started.append(DriverProcess(command, environment, tmp_path / "driver.log"))
        assert started[-1].wait_until_ready(30) == Facts("1.0", "fake", "none", (started[-1].group,))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_a_driver_answers_with_its_timings_also_after_it_was_suspended(start_driver):
    process = start_driver()
    process.suspend()
    process.resume()
    assert process.ask(WORKLOAD, 30) == Answer([0.0, 0.0], [[0.1, 0.25], [0.1, 0.25]])


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ('raise UnsupportedError("has 2 slots")', RefusedError, "has 2 slots"),
        ('sys.exit("no room for the KV cache")', EngineError, r"code 1: .*no room for the KV cache"),
    ],
)
def test_a_driver_says_why_it_cannot_do_it(start_driver, body, error, message):
    process = start_driver(body)
    for _ in range(2):
        with pytest.raises(error, match=message):
            process.ask(WORKLOAD, 30)


def test_a_driver_that_hangs_is_ended(start_driver):
    process = start_driver("time.sleep(600)")
    with pytest.raises(EngineError, match=r"neither an answer nor work within 0\.2 s"):
        process.ask(WORKLOAD, 0.2)


def test_a_driver_that_computes_is_waited_for_however_slow_it_is(start_driver):
    process = start_driver("until = time.process_time() + 0.6\n        while time.process_time() < until: pass")
    assert process.ask(WORKLOAD, 0.2).sent_s == [0.0, 0.0]


def test_a_driver_that_does_not_start_is_reported(tmp_path):
    process = DriverProcess([sys.executable, "-c", "import nothing_like_it"], {}, tmp_path / "driver.log")
    with pytest.raises(EngineError, match=r"did not start: ended with code 1: .*nothing_like_it"):
        process.wait_until_ready(30)
    process.end()


class CountingEngine:
    """Gives every request one token per step, and remembers when each came in."""

    def __init__(self):
        self.added = {}
        self.num_steps = 0

    def add(self, number, request):
        self.added[number] = self.num_steps

    def step(self):
        self.num_steps += 1
        return [(number, 1) for number in self.added]


def test_a_request_that_waits_for_others_is_sent_once_they_are_so_far():
    engine = CountingEngine()
    answer = run_steps(engine, Workload((Request((1,), 5), Request((2,), 5), Request((3,), 2, after_tokens=3))))
    assert engine.added == {0: 0, 1: 0, 2: 3}
    assert [len(times) for times in answer.token_s] == [5, 5, 2]


def test_an_engine_in_steps_does_not_bound_what_is_under_way():
    """It refuses rather than measures something else."""
    with pytest.raises(UnsupportedError):
        run_steps(CountingEngine(), Workload(WORKLOAD.requests, at_most=1))


class FakeDriver:
    """Answers at once, or fails; notes what is asked of it."""

    group = 1

    def __init__(self, name, events, failure):
        self.name, self.events, self.failure = name, events, failure

    def wait_until_ready(self, silence_s):
        return Facts("1.0", "fake", "none", ())

    def ask(self, workload, silence_s):
        """A token every 10 ms, or the failure."""
        if len(workload.requests) == 1:  # the warm-up is for everybody
            self.events.append(f"{self.name} runs")
            if self.failure is not None:
                raise self.failure
        token_s = [[0.01 * (index + 1) for index in range(request.num_tokens)] for request in workload.requests]
        return Answer([0.0] * len(token_s), token_s)

    def suspend(self):
        self.events.append(f"{self.name} stops")

    def resume(self):
        """Nothing to do."""

    def end(self):
        self.events.append(f"{self.name} ends")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the program with fake engines, ours and llama.cpp, on a clock that moves 10 s with every look at it.

    Returns its exit code, what the engines did and what it said.
    """
    events, failures, clock = [], {}, count(step=10)
    environment = Environment(tmp_path / "peer", ("peer==1.0",), "a while")
    engines = (Engine("paceline", "a", (), None), Engine("llama.cpp", "b", (), environment))
    mixed = tuple(replace(engine, name=f"{engine.name}, experts") for engine in engines)
    time = SimpleNamespace(monotonic=lambda: next(clock))
    of_program = {
        "BENCH": tmp_path,
        "MIXTURE_FILE": tmp_path / "mixture.gguf",
        "ROOT": tmp_path,
        "all_engines": lambda model: (*engines, *mixed),
        "install": lambda environment, say: events.append("installs"),
        "write_mixture": lambda path: (events.append("writes the mixture"), path.touch()),
        "model_file": lambda: Path("model.gguf"),
        "measure_quality": lambda command: {"fast": 12.1, "float32": 12.0},
        "end_with_what_was_started": lambda: None,
        "time": time,
    }
    of_run = {
        "wait_until_quiet": lambda patience_s: Quiet(0.0, 0.5),
        "start_driver": lambda engine: FakeDriver(engine.name, events, failures.get(engine.name)),
        "measure_limits": lambda: [Limits(30.0, 280.0, 170.0)],
        "time": time,
    }
    for module, fakes in ((program, of_program), (run_module, of_run)):
        for name, fake in fakes.items():
            monkeypatch.setattr(module, name, fake)

    def run(*options, **failing):
        events.clear()
        failures.clear()
        failures.update({"llama.cpp" if name == "peer" else name: error for name, error in failing.items()})
        result = CliRunner().invoke(program.app, options)
        return result.exit_code, list(events), result.output

    return run


ONE_ROW = ("--only", "context 60")


def test_peers_are_installed_before_the_clock_starts_and_engines_take_turns(bench):
    code, events, said = bench(*ONE_ROW, "--repetitions", "2")
    turns = ["paceline", "llama.cpp", "llama.cpp", "paceline"]
    runs = [event for name in turns for event in (f"{name} runs", f"{name} stops")]
    assert (code, events) == (0, ["installs", *runs, "paceline ends", "llama.cpp ends"])
    assert "reached 0 of 1" in said  # both are as fast


def test_a_mixture_is_measured_where_it_is_named_and_its_file_is_gone_at_the_end(bench, tmp_path):
    code, events, said = bench("--only", "experts: 1 request", "--repetitions", "1")
    runs = [
        event for name in ("paceline", "llama.cpp") for event in (f"{name}, experts runs", f"{name}, experts stops")
    ]
    ends = ["paceline, experts ends", "llama.cpp, experts ends"]
    assert (code, events) == (0, ["installs", "writes the mixture", *runs, *ends])
    assert "experts: 1 request, context 440" in said
    assert not (tmp_path / "mixture.gguf").exists()
    _, events, _ = bench("--repetitions", "1", "--engines", "none")
    assert not [event for event in events if "mixture" in event or "experts" in event]


def test_no_further_repetition_begins_that_would_not_end_in_time(bench):
    """The first one is taken wholly, however slow the machine is."""
    for minutes, num_repetitions in (("0.01", 1), ("0.8", 2)):
        code, events, _ = bench(*ONE_ROW, "--repetitions", "9", "--minutes", minutes)
        assert (code, events.count("paceline runs")) == (0, num_repetitions)


def test_an_engine_that_fails_is_started_once_more_and_then_given_up(bench):
    code, events, said = bench(*ONE_ROW, "--repetitions", "3", peer=EngineError("ended with code 1"))
    assert (code, events.count("llama.cpp runs"), events.count("paceline runs")) == (1, 2, 3)
    assert "llama.cpp 1.0, fake: none; then single-60: ended with code 1" in said
    assert "not measured, see above: decode, 1 stream, context 60" in said


def test_an_engine_that_refuses_stays(bench):
    code, events, said = bench(*ONE_ROW, "--repetitions", "2", peer=RefusedError("has 2 slots"))
    assert (code, events.count("llama.cpp ends")) == (1, 1)
    assert "has 2 slots" in said


def test_a_peer_that_cannot_be_installed_leaves_its_rows_without_figures(bench, monkeypatch):
    def fails(environment, say):
        raise InstallError("not installed: no matching distribution")

    monkeypatch.setattr(program, "install", fails)
    code, events, said = bench("--only", "context 60,perplexity")
    assert (code, events.count("paceline runs")) == (1, 5)
    assert "llama.cpp: not available: not installed: no matching distribution" in said
    assert "not measured, see above: decode, 1 stream, context 60\n" in said  # the perplexity was


def test_a_run_that_is_interrupted_ends_its_engines_and_shows_what_it_has(bench):
    code, events, said = bench(*ONE_ROW, peer=KeyboardInterrupt())
    assert (code, events[-2:]) == (1, ["paceline ends", "llama.cpp ends"])
    assert "interrupted: the table holds what was measured so far" in said


def test_rows_that_are_not_there_are_refused(bench):
    code, events, said = bench("--only", "nonsense")
    assert (code, events) == (2, [])
    assert "no row has 'nonsense' in its name" in said


@pytest.mark.parametrize(("shares", "waited_s"), [((0.9, 0.5, 0.04), 1.5), ((0.9,) * 100, 20.0)])
def test_a_measurement_waits_for_a_quiet_machine_as_long_as_its_patience_lasts(shares, waited_s):
    """On a machine that stays busy the result is marked instead."""
    edges = [CpuTimes(sum(shares[:index]), float(index)) for index in range(len(shares) + 1)]
    looks = iter([look for pair in pairwise(edges) for look in pair])
    quiet = wait_until_quiet(20.0, looks.__next__, sleep=lambda _: None)
    assert quiet.waited_s == waited_s
    assert quiet.is_quiet == (waited_s < 20.0)


def test_what_pip_says_is_the_reason_that_a_peer_is_missing(tmp_path):
    """Once failed, there is no stamp: the next run tries again. Whoever waits is told for how long."""
    said, missing = [], str(tmp_path / "no-such-thing.whl")
    environment = Environment(tmp_path / "peer", (missing,), "a minute", variables={"PIP_NO_INDEX": "1"})
    with pytest.raises(InstallError, match=r"not installed: ERROR: .*no-such-thing"):
        install(environment, said.append)
    assert not (tmp_path / "peer" / "installed.txt").exists()
    assert said == [f"installing {missing}, once: a minute"]


@pytest.mark.parametrize(
    ("code", "message"),
    [("print('no JSON')", "the last line"), ("print('{}')", "the last line"), ("raise SystemExit(3)", "code 3")],
)
def test_a_perplexity_command_that_fails_is_reported(code, message):
    with pytest.raises(EngineError, match=message):
        measure_quality(["-c", code])


def test_perplexities_are_read_from_the_last_line():
    line = json.dumps({"texts": {"prose": {"perplexity": 12.1, "base_perplexity": 12.0}}})
    code = f"print('reading'); print('{line}'); raise SystemExit(10)"  # its verdict is another matter
    assert measure_quality(["-c", code]) == {"fast": 12.1, "float32": 12.0}


def test_every_engine_has_a_driver():
    for engine in all_engines(Path("model.gguf")):
        assert (SEARCH_PATH / "side_by_side" / "drivers" / f"{engine.driver}.py").is_file()
