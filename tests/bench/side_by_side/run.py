"""A run: repetitions of all measurements, engines taking turns within each, until the time is spent.

Knows how engines are kept apart: one computes, the others are stopped. Refuses to know what the values mean.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from subprocess import PIPE

from process_groups import run_program
from side_by_side.drivers.protocol import Request, Workload
from side_by_side.engines import BENCH, SEARCH_PATH, Engine
from side_by_side.errors import EngineError, RefusedError
from side_by_side.machine import PATIENCE_S, MemoryWatch, OthersWatch, wait_until_quiet
from side_by_side.measurements import Measurement, workloads_of
from side_by_side.process import DriverProcess
from side_by_side.results import EngineFacts, Limits, Results, Sample

_SILENCE_S = 60.0
_MAX_STARTS = 2
_WARM_UP = Workload((Request(tuple(range(1000, 1064)), 8),) * 2)


class EngineRunner:
    """One engine through a run: started when first needed, once more if it fails, then given up."""

    def __init__(self, engine: Engine, patience_s: float = PATIENCE_S) -> None:
        self.engine = engine
        self.facts = EngineFacts(engine.name)
        self._patience_s = patience_s
        self._driver: DriverProcess | None = None
        self._memory_pids: tuple[int, ...] = ()
        self._num_starts = 0

    @property
    def is_given_up(self) -> bool:
        return self._driver is None and self._num_starts >= _MAX_STARTS

    def give_up(self, error: EngineError) -> None:
        self._num_starts = _MAX_STARTS
        self.facts = replace(self.facts, problem=str(error))

    def measure(self, measurement: Measurement, repetition: int) -> Sample | None:
        """Run a measurement; None when the engine fails or cannot do it, which is said and kept in `facts`."""
        try:
            return self._measure(self._running(), measurement, repetition)
        except EngineError as error:
            say(f"{self.engine.name}: {measurement.name}: {error}")
            if not isinstance(error, RefusedError):
                self.facts = replace(self.facts, problem=f"{measurement.name}: {error}")
                self.end()
        return None

    def end(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.end()

    def _running(self) -> DriverProcess:
        if self._driver is not None:
            return self._driver
        say(f"{self.engine.name}: starting")
        self._num_starts += 1
        self._driver = driver = start_driver(self.engine)
        ready = driver.wait_until_ready(_SILENCE_S)
        self.facts = replace(
            self.facts, version=ready.version, harness=ready.harness, configuration=ready.configuration
        )
        self._memory_pids = ready.memory_pids
        driver.ask(_WARM_UP, _SILENCE_S)
        return driver

    def _measure(self, driver: DriverProcess, measurement: Measurement, repetition: int) -> Sample:
        workloads = workloads_of(measurement, repetition)
        watched = self._memory_pids if measurement.measures_memory else ()
        quiet = wait_until_quiet(self._patience_s)
        load_average = os.getloadavg()[0]
        if self.engine.is_suspended:
            driver.resume()
        try:
            with OthersWatch(driver.group) as others, MemoryWatch(watched) as memory:
                answers = [driver.ask(workload, _SILENCE_S) for workload in workloads]
        finally:
            if self.engine.is_suspended:
                driver.suspend()
        values = measurement.values(workloads, answers)
        if measurement.measures_memory:
            values["peak_bytes"] = float(memory.peak_bytes)
        return Sample(
            measurement.name,
            self.engine.name,
            repetition,
            values,
            quiet.busy_share,
            others.share,
            quiet.waited_s,
            load_average,
            [asdict(answer) for answer in answers],
        )


def measure_all(
    runners: Sequence[EngineRunner],
    measurements: Sequence[Measurement],
    num_repetitions: int,
    end_s: float,
    results: Results,
    patience_s: float = PATIENCE_S,
) -> None:
    """Measure so often, or until the time is over by the monotonic clock.

    A repetition that would not end in time is not begun, going by the one before. The first one is taken wholly: on a
    slower machine a run takes longer, and says as much. Within a repetition engines take turns, and who begins changes.
    """
    results.engines |= {runner.engine.name: runner.facts for runner in runners}
    longest_s = 0.0
    for repetition in range(num_repetitions):
        start_s = time.monotonic()
        if repetition and start_s + longest_s > end_s:
            break
        wait_until_quiet(patience_s)
        results.limits += measure_limits()
        for measurement in measurements:
            asked = [each for each in runners if each.engine.name in measurement.engines]
            first = repetition % max(1, len(asked))
            for runner in (*asked[first:], *asked[:first]):
                if not runner.is_given_up:
                    _take(runner, measurement, repetition, results)
        longest_s = max(longest_s, time.monotonic() - start_s)


def _take(runner: EngineRunner, measurement: Measurement, repetition: int, results: Results) -> None:
    sample = runner.measure(measurement, repetition)
    results.engines[runner.engine.name] = runner.facts
    if sample is None:
        return
    results.samples.append(sample)
    values = ", ".join(f"{name} {number:.4g}" for name, number in sample.values.items())
    disturbed = f"; others took {sample.others_share:.0%}" if sample.is_disturbed else ""
    say(f"{repetition + 1}: {measurement.name}, {runner.engine.name}: {values}{disturbed}")


def start_driver(engine: Engine) -> DriverProcess:
    """By its environment's interpreter; its log is named like the driver."""
    python = engine.environment.python if engine.environment else sys.executable
    command = [python, "-m", f"side_by_side.drivers.{engine.driver}", *engine.arguments]
    log = BENCH / "logs" / f"{engine.driver}.log"
    return DriverProcess(command, {**engine.variables, "PYTHONPATH": str(SEARCH_PATH)}, log)


def measure_limits() -> list[Limits]:
    """The machine's, if they can be measured."""
    command = [sys.executable, "-W", "ignore", str(SEARCH_PATH / "side_by_side" / "drivers" / "limits.py")]
    finished = run_program(command, stdout=PIPE)
    if finished.code != 0:
        say(f"the machine's limits were not measured: code {finished.code}")
        return []
    return [Limits(**json.loads(finished.stdout))]


def say(text: str) -> None:
    """Progress, on stderr: the table alone is on stdout."""
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)
