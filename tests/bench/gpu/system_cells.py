"""The whole system's side of the figures: a client in this process, scheduler and executor in theirs.

Knows streams and when their tokens came. Prompts are random, so that no prefix is found; they are computed.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Self

import grpc.aio

from gpu.bench_models import Timed
from gpu.cells import Cell, Kind, spread_of
from gpu.engine_cells import flops_of
from gpu.errors import DoesNotFitError
from gpu.report import Figure
from gpu.system import System
from gpu.wire import StepSums, read_step_sums
from paceline_client.async_client import AsyncClient
from paceline_client.config import Limits, Retry
from paceline_client.requests import Sampling, Scheduling, Stopping

_UNCACHED = Scheduling(bypass_prefix_cache=True, max_num_draft_tokens=0)
_GREEDY = Sampling(temperature=0.0)
_WARM_TOKENS = 8
_MAX_REQUESTS = 4096
_LEAST_CHUNK = 64
_FIRST_ID = 3


@dataclass(slots=True, eq=False)
class Arrivals:
    """When a stream's tokens came."""

    begun_s: float
    times_s: list[float] = field(default_factory=list)  # a time per delta
    counts: list[int] = field(default_factory=list)  # tokens of each

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def tokens_within(self, start_s: float, end_s: float) -> int:
        """Those that came after the start, up to the end."""
        pairs = zip(self.times_s, self.counts, strict=True)
        return sum(count for time_s, count in pairs if start_s < time_s <= end_s)

    def gaps(self, start_s: float, end_s: float) -> list[float]:
        """Between two deltas each, of which the later one came within these times."""
        return [now - then for then, now in itertools.pairwise(self.times_s) if start_s < now <= end_s]


@dataclass(slots=True)
class SystemCells:
    """Measures one system, cell by cell. The methods of cells return values in the order of `Shapes.figures_of`."""

    numbers: str
    what: Timed
    client: AsyncClient
    operators: grpc.aio.Channel
    _random: Random = field(default_factory=lambda: Random(1))  # noqa: S311  repeatable, not secret

    @classmethod
    async def connect(cls, system: System, numbers: str, what: Timed) -> Self:
        """Made on the loop that measures."""
        return cls(numbers, what, patient_client(system.target), grpc.aio.insecure_channel(system.admin))

    async def close(self) -> None:
        await self.client.close()
        await self.operators.close()

    async def measure(self, cell: Cell) -> list[Figure]:
        measured: Mapping[Kind, Callable[..., Awaitable[tuple[float, ...]]]] = {
            Kind.DECODE: self._decode,
            Kind.PREFILL: self._prefill,
            Kind.ARRIVAL: self._arrival,
            Kind.THROUGHPUT: self._throughput,
        }
        values = await measured[cell.kind](*cell.sizes)
        figures = zip(self.what.shapes.figures_of(cell), values, strict=True)
        return [Figure(self.numbers, *figure, system=value) for figure, value in figures]

    async def _decode(self, num_rows: int, context: int) -> tuple[float, ...]:
        """Time per token of each stream, from when all decode until the first one ends."""
        num_chunks = -(-num_rows * context // self.what.max_tokens)
        num_tokens = num_chunks + 2 * _WARM_TOKENS + self.what.shapes.num_steps
        # In the middle of what is timed: the first streams decode beside the prompts of the last ones.
        start = max(2, context - (num_chunks + self.what.shapes.num_steps) // 2 - _WARM_TOKENS)
        streams = [Arrivals(time.perf_counter()) for _ in range(num_rows)]
        tasks = [asyncio.create_task(self._stream(stream, start, num_tokens)) for stream in streams]
        try:
            await _until(lambda: all(one.num_tokens >= _WARM_TOKENS for one in streams), tasks)
            if any(task.done() for task in tasks):
                raise DoesNotFitError(f"{num_rows} streams of {context} tokens do not all run at a time here")
            before, start_s = await self._sums()
            await _until(lambda: any(task.done() for task in tasks), tasks)
            after, end_s = await self._sums()
        finally:
            await asyncio.gather(*tasks)
        last_s = min(end_s, *(one.times_s[-1] for one in streams))
        tokens = sum(one.tokens_within(start_s, last_s) for one in streams)
        idle = max(0.0, 100 * (1 - after.since(before).busy_ns / 1e9 / (end_s - start_s)))
        return 1e3 * (last_s - start_s) * num_rows / tokens, idle

    async def _prefill(self, num_tokens: int) -> tuple[float, ...]:
        """From the call to the first token; the first time is not counted."""
        times_ms = []
        for _ in range(self.what.shapes.num_repeats + 1):
            stream = Arrivals(time.perf_counter())
            await self._stream(stream, num_tokens, 1)
            times_ms.append(1e3 * (stream.times_s[0] - stream.begun_s))
        median = statistics.median(times_ms[1:])
        return median, flops_of(self.what.config, num_tokens) / median / 1e9

    async def _arrival(self, num_tokens: int) -> tuple[float, ...]:
        """The largest gap between two deltas of any stream, and how far the rare ones are from the usual ones, while a
        prompt that came beside them is computed.
        """
        rows, context = self.what.shapes.arrival_rows, self.what.shapes.arrival_context
        streams = [Arrivals(time.perf_counter()) for _ in range(rows)]
        # They go on until they are left: as many tokens as the prompt may have chunks.
        most = num_tokens // _LEAST_CHUNK + self.what.shapes.num_steps + _WARM_TOKENS
        tasks = [asyncio.create_task(self._stream(one, context, most)) for one in streams]
        try:
            await _until(lambda: all(one.num_tokens >= _WARM_TOKENS for one in streams), tasks)
            arriving = Arrivals(time.perf_counter())
            await self._stream(arriving, num_tokens, 1)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        gaps = [gap for one in streams for gap in one.gaps(arriving.begun_s, arriving.times_s[-1])]
        return 1e3 * max(gaps, default=0.0), spread_of(gaps)

    async def _throughput(self, tokens_in: int, tokens_out: int) -> tuple[float, ...]:
        """All requests at once, from the first call to the last token."""
        streams = [Arrivals(time.perf_counter()) for _ in range(self.what.shapes.num_requests)]
        begun_s = time.perf_counter()
        await asyncio.gather(*(self._stream(one, tokens_in, tokens_out) for one in streams))
        return (len(streams) * tokens_out / (time.perf_counter() - begun_s),)

    async def _stream(self, arrivals: Arrivals, num_prompt: int, num_tokens: int) -> None:
        prompt = [self._random.randrange(_FIRST_ID, self.what.config.vocab_size) for _ in range(num_prompt)]
        arrivals.begun_s = time.perf_counter()
        stopping = Stopping(max_tokens=num_tokens, ignore_eos=True)
        stream = self.client.stream(token_ids=prompt, sampling=_GREEDY, stopping=stopping, scheduling=_UNCACHED)
        async with stream:
            async for delta in stream:
                if delta.token_ids:
                    arrivals.times_s.append(time.perf_counter())
                    arrivals.counts.append(len(delta.token_ids))

    async def _sums(self) -> tuple[StepSums, float]:
        sums = await read_step_sums(self.operators)
        return sums, time.perf_counter()


def patient_client(target: str) -> AsyncClient:
    """A client that takes as many streams as there are."""
    limits = Limits(max_concurrent_requests=_MAX_REQUESTS)
    return AsyncClient(target, retry=Retry(max_attempts=1), limits=limits)


async def _until(condition: Callable[[], bool], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Until it holds; raises what a task has failed with."""
    while not condition():
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.002)
