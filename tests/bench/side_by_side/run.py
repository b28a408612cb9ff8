"""A run: repetitions of all measurements, engines taking turns within each, until the time is spent.

Knows how engines are kept apart: one computes, the others are stopped. Refuses to know what the values mean.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from side_by_side.drivers.protocol import Answer, Facts, Request, Workload
from side_by_side.engines import Engine
from side_by_side.errors import EngineError, RefusedError
from side_by_side.machine import MemoryWatch, OthersWatch, Quiet
from side_by_side.measurements import Measurement, workloads_of
from side_by_side.results import EngineFacts, Limits, Results, Sample

_SILENCE_S = 60.0
_MAX_STARTS = 2
_WARM_UP = Workload((Request(tuple(range(1000, 1064)), 8),) * 2)


class Driver(Protocol):
    """What a driver's process is to a run."""

    @property
    def group(self) -> int:
        """Its process group."""

    def wait_until_ready(self, silence_s: float) -> Facts:
        """What it says of its engine."""

    def ask(self, workload: Workload, silence_s: float) -> Answer:
        """Run a workload."""

    def suspend(self) -> None:
        """Stop it."""

    def resume(self) -> None:
        """Let it go on."""

    def end(self) -> None:
        """End it."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run needs of the world: how drivers start, what the machine does and can do, the time, and who listens."""

    start: Callable[[Engine], Driver]
    wait_until_quiet: Callable[[], Quiet]
    measure_limits: Callable[[], Limits | None]
    now: Callable[[], float]
    say: Callable[[str], None]


class EngineRunner:
    """One engine through a run: started when first needed, once more if it fails, then given up."""

    def __init__(self, engine: Engine, surroundings: Surroundings) -> None:
        self.engine = engine
        self.facts = EngineFacts(engine.name)
        self._surroundings = surroundings
        self._driver: Driver | None = None
        self._memory_pids: tuple[int, ...] = ()
        self._num_starts = 0

    @property
    def is_given_up(self) -> bool:
        """Whether it failed too often."""
        return self._driver is None and self._num_starts >= _MAX_STARTS

    def give_up(self, error: EngineError) -> None:
        """It cannot be measured at all."""
        self._num_starts = _MAX_STARTS
        self.facts = replace(self.facts, problem=str(error))

    def measure(self, measurement: Measurement, repetition: int) -> Sample | None:
        """Run a measurement; None when the engine fails or cannot do it, which is said and kept in `facts`."""
        try:
            return self._measure(self._running(), measurement, repetition)
        except RefusedError as error:
            self._surroundings.say(f"{self.engine.name}: {measurement.name}: {error}")
        except EngineError as error:
            self._surroundings.say(f"{self.engine.name}: {measurement.name}: {error}")
            self.facts = replace(self.facts, problem=f"{measurement.name}: {error}")
            self.end()
        return None

    def end(self) -> None:
        """End its processes."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.end()

    def _running(self) -> Driver:
        if self._driver is not None:
            return self._driver
        self._surroundings.say(f"{self.engine.name}: starting")
        self._num_starts += 1
        self._driver = driver = self._surroundings.start(self.engine)
        facts = driver.wait_until_ready(_SILENCE_S)
        self.facts = replace(
            self.facts, version=facts.version, harness=facts.harness, configuration=facts.configuration
        )
        self._memory_pids = facts.memory_pids
        driver.ask(_WARM_UP, _SILENCE_S)
        return driver

    def _measure(self, driver: Driver, measurement: Measurement, repetition: int) -> Sample:
        workloads = workloads_of(measurement, repetition)
        watched = self._memory_pids if measurement.measures_memory else ()
        quiet = self._surroundings.wait_until_quiet()
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


class Run:
    """All measurements, again and again: within a repetition engines take turns, and who begins changes."""

    def __init__(self, engines: Sequence[EngineRunner], surroundings: Surroundings, results: Results) -> None:
        self._engines = engines
        self._surroundings = surroundings
        self._results = results
        for runner in engines:
            results.engines[runner.engine.name] = runner.facts

    def repeat(self, measurements: Sequence[Measurement], num_repetitions: int, end_s: float) -> None:
        """Measure until it was done so often, or until the time is over, by the clock of the surroundings.

        A repetition that would not end in time is not begun, going by the one before. The first one is taken wholly:
        on a slower machine a run takes longer, and says as much.
        """
        longest_s = 0.0
        for repetition in range(num_repetitions):
            start_s = self._surroundings.now()
            if repetition and start_s + longest_s > end_s:
                break
            self._repeat_once(measurements, repetition)
            longest_s = max(longest_s, self._surroundings.now() - start_s)

    def _repeat_once(self, measurements: Sequence[Measurement], repetition: int) -> None:
        self._surroundings.wait_until_quiet()
        limits = self._surroundings.measure_limits()
        if limits is not None:
            self._results.limits.append(limits)
        for measurement in measurements:
            runners = [each for each in self._engines if each.engine.name in measurement.engines]
            first = repetition % max(1, len(runners))
            for runner in (*runners[first:], *runners[:first]):
                if not runner.is_given_up:
                    self._take(runner, measurement, repetition)

    def _take(self, runner: EngineRunner, measurement: Measurement, repetition: int) -> None:
        sample = runner.measure(measurement, repetition)
        self._results.engines[runner.engine.name] = runner.facts
        if sample is None:
            return
        self._results.samples.append(sample)
        values = ", ".join(f"{name} {number:.4g}" for name, number in sample.values.items())
        disturbed = f"; others took {sample.others_share:.0%}" if sample.is_disturbed else ""
        self._surroundings.say(f"{repetition + 1}: {measurement.name}, {runner.engine.name}: {values}{disturbed}")
