"""What many executors cost: `python -m scheduler_cost.dispatch_cost [--executors 64] [--arrivals 16] [--fill 2048]`.

Prints the core's own CPU time, against executors that answer at once: of one plan of each, with and without requests
that have just arrived, of taking one of these, and of filling the executors from a long queue.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import Detach, ExecutorAttached, StepFinished, Submit
from paceline_scheduler.core.executors import Snapshot
from paceline_scheduler.core.limits import CoreLimits
from scheduler_cost.planning_cost import answer, describe, request

_NUM_ROWS = 64
_NUM_BUSY = 10
_NUM_ROUNDS = 20


class Fleet:
    """Executors `e0`, `e1` and so on, with one step each in flight between two rounds."""

    def __init__(self, num_executors: int) -> None:
        self.core = Core(CoreLimits(max_num_queued_reqs=1 << 20, max_num_queued_tokens=1 << 40))
        self._addresses = [f"e{number}" for number in range(num_executors)]
        self._num_requests = 0
        self._now = 0.0
        for address in self._addresses:
            description = replace(describe(_NUM_ROWS, 1000), address=address)
            self.core.apply(ExecutorAttached(description, Snapshot()), 0.0)

    def submit(self, count: int) -> list[float]:
        """Return the milliseconds of each."""
        times = []
        for _ in range(count):
            self._num_requests += 1
            event = Submit((request(self._num_requests, 64),))
            start = time.thread_time_ns()
            self.core.apply(event, self._now)
            times.append((time.thread_time_ns() - start) / 1e6)
        return times

    def round(self) -> float:
        """Let each finish a step and get the next one; return the milliseconds of planning."""
        self._now += 0.01
        planning_ns = 0
        for address in self._addresses:
            start = time.thread_time_ns()
            plan = self.core.plan(address, self._now)
            planning_ns += time.thread_time_ns() - start
            if plan is not None:
                result = answer(plan, self.core.views.executor(address))
                self.core.apply(StepFinished(address, result), self._now)
        return planning_ns / 1e6

    def place(self) -> None:
        """Go on until no request waits."""
        while self.core.views.num_waiting()[0]:
            self.round()

    def end(self, count: int) -> None:
        """Let the newest requests go, and the executors confirm it."""
        for handle in range(self._num_requests - count + 1, self._num_requests + 1):
            self.core.apply(Detach(handle), self._now)
        self.round()

    def fill(self, count: int) -> float:
        """Return the seconds until none of so many requests waits."""
        start = time.thread_time_ns()
        self.submit(count)
        self.place()
        return (time.thread_time_ns() - start) / 1e9


def measure(num_executors: int, num_arrivals: int) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return the milliseconds of rounds in which nobody waits, of those after arrivals, and of taking a request."""
    fleet = Fleet(num_executors)
    for _ in range(_NUM_BUSY):
        fleet.submit(num_executors)
        fleet.place()
    idle, busy, taking = [], [], []
    for _ in range(_NUM_ROUNDS):
        idle.append(fleet.round())
        taking += fleet.submit(num_arrivals)
        busy.append(fleet.round())
        fleet.place()
        fleet.end(num_arrivals)
    return idle, busy, taking


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(description="Measure what many executors cost the scheduler's core.")
    parser.add_argument("--executors", type=int, default=64, help="of one model (default 64)")
    parser.add_argument("--arrivals", type=int, default=16, help="requests at a time (default 16)")
    parser.add_argument("--fill", type=int, default=0, help="requests with which to fill empty executors (default 0)")
    arguments = parser.parse_args()
    idle, busy, taking = map(statistics.median, measure(arguments.executors, arguments.arrivals))
    print(
        f"{arguments.executors} executors: a plan of each {idle:.1f} ms, after {arguments.arrivals} arrivals "
        f"{busy:.1f} ms; taking one {taking:.2f} ms"
    )
    if arguments.fill:
        print(f"filled with {arguments.fill} requests in {Fleet(arguments.executors).fill(arguments.fill):.1f} s")


if __name__ == "__main__":
    main()
