"""Sends the requests of a rung as its load asks for, and writes down what comes back.

Knows when to send. Refuses to know what a server is and what the times mean. A failed request is a record like any
other.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

from paceline_cli.bench.clock import Clock
from paceline_cli.bench.prompts import PromptWriter
from paceline_cli.bench.records import Record, RequestFailure, RungRun
from paceline_cli.bench.rungs import ClosedLoop, Rung
from paceline_cli.bench.targets import Outgoing, Target
from paceline_cli.bench.workload import PlannedRequest, Segment
from paceline_client.errors import PacelineError


class LoadGenerator:
    """Sends to one target. `run` is for one rung at a time."""

    def __init__(self, target: Target, prompts: PromptWriter, clock: Clock, *, cache_group: str) -> None:
        self._target = target
        self._prompts = prompts
        self._clock = clock
        self._cache_group = cache_group
        self._num_runs = 0

    async def warm_up(self, planned: PlannedRequest, number: int) -> None:
        """Send a request as long as this one that is not measured. Raises what it fails with, a `PacelineError`."""
        # With a prompt of its own: no measured one must find its prefix in a cache.
        segments = (Segment(f"warm-up {number}", planned.num_prompt_tokens),)
        outgoing = self._outgoing(replace(planned, segments=segments), f"{self._cache_group}-warm-up")
        await self._target.send(outgoing, [])

    def begin(self, rung: Rung) -> RungRun:
        return RungRun(rung, self._clock.now())

    async def run(self, run: RungRun, stop: asyncio.Event) -> None:
        """Send everything and wait for the answers, or until `stop` is set; what runs then is cancelled."""
        self._num_runs += 1
        group = f"{self._cache_group}-{self._num_runs}"
        run.started = self._clock.now()
        match run.rung.load:
            case ClosedLoop(max_concurrency):
                work = self._closed_loop(run, max_concurrency, group)
            case _:
                work = self._open_loop(run, group)
        await _until(work, stop)
        run.ended = self._clock.now()

    async def _closed_loop(self, run: RungRun, max_concurrency: int, group: str) -> None:
        waiting = iter(run.rung.requests)

        async def work_off(requests: Iterator[PlannedRequest]) -> None:
            for planned in requests:
                await self._send(run, planned, None, group)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(max_concurrency):
                tasks.create_task(work_off(waiting))

    async def _open_loop(self, run: RungRun, group: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            for planned in run.rung.requests:
                due = run.started + (planned.at_seconds or 0.0)
                if (pause := due - self._clock.now()) > 0:
                    await self._clock.sleep(pause)
                tasks.create_task(self._send(run, planned, due, group))

    async def _send(self, run: RungRun, planned: PlannedRequest, due: float | None, group: str) -> None:
        outgoing = self._outgoing(planned, group)
        record = Record(planned, due, self._clock.now())
        run.records.append(record)
        try:
            record.outcome = await self._target.send(outgoing, record.times)
        except PacelineError as error:
            record.outcome = RequestFailure(type(error).__name__, str(error))

    def _outgoing(self, planned: PlannedRequest, group: str) -> Outgoing:
        return Outgoing(self._prompts.write(planned.segments), planned.num_output_tokens, group)


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Cancels the work when the event is set."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait((working, stopping))
    if not working.cancelled():
        working.result()
