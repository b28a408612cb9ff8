"""The side-by-side run: drivers that answer, die and hang, engines that take turns, and the wait for quiet."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from side_by_side.drivers.protocol import Answer, Facts, Request, UnsupportedError, Workload, run_steps
from side_by_side.engines import SEARCH_PATH, Engine, Environment
from side_by_side.errors import DiedError, EngineError, InstallError, RefusedError, SilentError, StartError
from side_by_side.install import install
from side_by_side.machine import CpuTimes, MemoryWatch, Quiet, wait_until_quiet
from side_by_side.measurements import Measurement
from side_by_side.process import DriverProcess
from side_by_side.quality import measure_quality
from side_by_side.results import Limits, Results
from side_by_side.run import EngineRunner, Run, Surroundings

WORKLOAD = Workload((Request((1, 2, 3), 2), Request((4, 5, 6), 2)))
DRIVER = """
    import os, sys, time
    from side_by_side.drivers.protocol import Answer, Facts, UnsupportedError, reserve_stdout, serve
    channel = reserve_stdout()
    print("a library's own words")
    def run(workload):
        {body}
    serve(channel, Facts("1.0", "fake", "none", (os.getpid(),)), run)
"""
ANSWERS = "return Answer([0.0, 0.0], [[0.1, 0.25]] * len(workload.requests))"


def driver(folder, body):
    """A driver's process whose engine does this."""
    script = folder / "driver.py"
    script.write_text(textwrap.dedent(DRIVER.format(body=body)))
    return DriverProcess([sys.executable, str(script)], {"PYTHONPATH": str(SEARCH_PATH)}, folder / "driver.log")


@pytest.fixture
def start_driver(tmp_path):
    """Starts drivers, and ends what is left of them."""
    started = []

    def start(body):
        started.append(driver(tmp_path, body))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_a_driver_answers_with_its_timings(start_driver):
    process = start_driver(ANSWERS)
    facts = process.wait_until_ready(30)
    assert (facts.version, facts.harness) == ("1.0", "fake")
    assert process.ask(WORKLOAD, 30) == Answer([0.0, 0.0], [[0.1, 0.25], [0.1, 0.25]])


def test_a_driver_goes_on_after_it_was_suspended(start_driver):
    process = start_driver(ANSWERS)
    process.wait_until_ready(30)
    process.suspend()
    process.resume()
    assert process.ask(WORKLOAD, 30).sent_s == [0.0, 0.0]


def test_a_driver_that_cannot_do_it_says_so_and_stays(start_driver):
    process = start_driver('raise UnsupportedError("has 2 slots")')
    process.wait_until_ready(30)
    for _ in range(2):
        with pytest.raises(RefusedError, match="has 2 slots"):
            process.ask(WORKLOAD, 30)


def test_a_driver_that_dies_is_reported_with_its_last_words(start_driver):
    process = start_driver('sys.exit("no room for the KV cache")')
    process.wait_until_ready(30)
    with pytest.raises(DiedError, match=r"code 1: .*no room for the KV cache"):
        process.ask(WORKLOAD, 30)
    with pytest.raises(DiedError):
        process.ask(WORKLOAD, 30)


def test_a_driver_that_hangs_is_ended(start_driver):
    process = start_driver("time.sleep(600)")
    process.wait_until_ready(30)
    with pytest.raises(SilentError, match=r"no answer within 0\.2 s"):
        process.ask(WORKLOAD, 0.2)


def test_a_driver_that_does_not_start_is_reported(tmp_path):
    process = DriverProcess([sys.executable, "-c", "import nothing_like_it"], {}, tmp_path / "driver.log")
    with pytest.raises(StartError, match=r"did not start: ended with code 1: .*nothing_like_it"):
        process.wait_until_ready(30)
    process.end()


class CountingEngine:
    """Gives every request one token per step, and remembers when each came in."""

    def __init__(self):
        self.added = {}
        self.num_steps = 0

    def add(self, number, request):
        """Note when it came."""
        self.added[number] = self.num_steps

    def step(self):
        """One token for each."""
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

    def wait_until_ready(self, limit_s):
        """At once."""
        return Facts("1.0", "fake", "none", ())

    def ask(self, workload, limit_s):
        """Two tokens, or the failure."""
        # The warm-up is for everybody.
        if len(workload.requests) == 1:
            self.events.append(f"{self.name} runs")
            if self.failure is not None:
                raise self.failure
        return Answer([0.0], [[0.5, 1.0]])

    def suspend(self):
        """Note it."""
        self.events.append(f"{self.name} stops")

    def resume(self):
        """Nothing to do."""

    def end(self):
        """Note it."""
        self.events.append(f"{self.name} ends")


def measured(*names, failures=None, num_repetitions=1, seconds_per_look=0.0, end_s=100.0):
    """Events and results of a run of fake engines, on a clock that moves with every look at it."""
    events, clock = [], [0.0]

    def now():
        clock[0] += seconds_per_look
        return clock[0]

    surroundings = Surroundings(
        start=lambda engine: FakeDriver(engine.name, events, (failures or {}).get(engine.name)),
        wait_until_quiet=lambda: Quiet(0.0, 0.5),
        measure_limits=lambda: Limits(30.0, 280.0, 170.0),
        now=now,
        say=lambda text: None,
    )
    measurement = Measurement(
        "m", names, lambda chance: [Workload((Request((1,), 2),))], lambda _, answers: {"s": answers[0].token_s[0][-1]}
    )
    results = Results("", "")
    runners = [EngineRunner(Engine(name, name, (), None), surroundings) for name in names]
    Run(runners, surroundings, results).repeat([measurement], num_repetitions, end_s)
    return events, results


def test_one_engine_is_stopped_before_the_next_one_runs():
    events, results = measured("a", "b", num_repetitions=2)
    assert events == ["a runs", "a stops", "b runs", "b stops", "b runs", "b stops", "a runs", "a stops"]
    assert [(each.engine, each.repetition) for each in results.samples] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_an_engine_that_fails_is_started_once_more_and_then_given_up():
    events, results = measured("a", "b", failures={"a": DiedError("ended with code 1")}, num_repetitions=3)
    assert events.count("a runs") == 2
    assert events.count("b runs") == 3
    assert results.engines["a"].problem == "m: ended with code 1"
    assert {each.engine for each in results.samples} == {"b"}


def test_an_engine_that_refuses_stays():
    events, results = measured("a", failures={"a": RefusedError("has 2 slots")}, num_repetitions=2)
    assert "a ends" not in events
    assert results.engines["a"].problem == ""


def test_no_repetition_begins_that_would_not_end_in_time():
    _, results = measured("a", num_repetitions=9, seconds_per_look=10.0, end_s=70.0)
    assert [each.repetition for each in results.samples] == [0, 1]


def readings(*shares):
    """A reader of CPU times on a machine that is busy to these shares, from look to look."""
    busy_s, total_s, values = 0.0, 0.0, [CpuTimes(0.0, 0.0)]
    for share in shares:
        before = CpuTimes(busy_s, total_s)
        busy_s, total_s = busy_s + share, total_s + 1.0
        values += [before, CpuTimes(busy_s, total_s)]
    return iter(values[1:]).__next__


def test_a_measurement_waits_until_the_machine_is_quiet():
    quiet = wait_until_quiet(20.0, readings(0.9, 0.5, 0.04), sleep=lambda _: None)
    assert quiet.is_quiet
    assert quiet.busy_share == pytest.approx(0.04)
    assert quiet.waited_s == 1.5


def test_the_wait_for_quiet_ends_on_a_machine_that_stays_busy():
    """The result is marked instead."""
    quiet = wait_until_quiet(20.0, readings(*[0.9] * 100), sleep=lambda _: None)
    assert quiet.waited_s == 20.0
    assert not quiet.is_quiet


def test_memory_of_a_process_that_has_ended_is_none():
    with MemoryWatch([2**22 + 1]) as memory:
        pass
    assert memory.peak_bytes == 0


def test_what_pip_says_is_the_reason_that_a_peer_is_missing(tmp_path):
    """Once failed, there is no stamp: the next run tries again."""
    environment = Environment(
        tmp_path / "peer", (str(tmp_path / "no-such-thing.whl"),), variables={"PIP_NO_INDEX": "1"}
    )
    with pytest.raises(InstallError, match=r"not installed: ERROR: .*no-such-thing"):
        install(environment, lambda text: None)
    assert not (tmp_path / "peer" / "installed.txt").exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [("print('no JSON')", "the last line"), ("print('{}')", "the last line"), ("raise SystemExit(3)", "code 3")],
)
def test_a_perplexity_command_that_fails_is_reported(program, message):
    with pytest.raises(EngineError, match=message):
        measure_quality(["-c", program], 30)


def test_perplexities_are_read_from_the_last_line():
    line = json.dumps({"fast": 12.1, "float32": 12.0})
    assert measure_quality(["-c", f"print('reading'); print('{line}')"], 30) == {"fast": 12.1, "float32": 12.0}


def test_every_engine_has_a_driver():
    from side_by_side.engines import all_engines

    for engine in all_engines(Path("model.gguf")):
        assert (SEARCH_PATH / "side_by_side" / "drivers" / f"{engine.driver}.py").is_file()
