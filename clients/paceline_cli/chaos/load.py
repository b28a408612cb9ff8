"""The load: so many streams at a time, each compared with its undisturbed output while it arrives.

Knows requests and the client library. Refuses to know faults.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from paceline_cli.chaos.comparison import StreamComparison
from paceline_cli.chaos.ledger import ChaosLedger, StreamProgress
from paceline_cli.chaos.requests import ChaosRequest
from paceline_client.async_client import AsyncClient
from paceline_client.errors import PacelineError
from paceline_client.results import Result

# A server that refuses everything is asked again, and not as fast as this loop can.
_PAUSE_AFTER_FAILURE_SECONDS = 0.2


async def undisturbed_results(client: AsyncClient, requests: Sequence[ChaosRequest], model: str) -> dict[str, Result]:
    """What each request generates when nothing happens, by its name. Raises a `PacelineError` when one fails."""
    streams = [request.stream(client, model) for request in requests]
    results = await asyncio.gather(*(stream.collect() for stream in streams))
    return {request.name: result for request, result in zip(requests, results, strict=True)}


class ClosedLoopLoad:
    """Keeps `num_streams` requests running until told to stop, and tells the ledger what became of each."""

    def __init__(
        self,
        client: AsyncClient,
        expected: Mapping[str, Result],
        requests: Sequence[ChaosRequest],
        ledger: ChaosLedger,
        *,
        model: str,
        num_streams: int,
        seed: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._expected = expected
        self._ledger = ledger
        self._model = model
        self._num_streams = num_streams
        self._now = now
        self._requests = _in_random_order(requests, random.Random(seed))  # noqa: S311  repeatable, not secret
        self._is_stopping = asyncio.Event()

    async def run(self) -> None:
        """Return when it was told to stop and the last stream has ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_streams):
                group.create_task(self._keep_one_running())

    def stop(self) -> None:
        self._is_stopping.set()

    async def _keep_one_running(self) -> None:
        while not self._is_stopping.is_set():
            if not await self._run_one(next(self._requests)):
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_SECONDS)

    async def _run_one(self, request: ChaosRequest) -> bool:
        """Whether it came to its end."""
        pauses_by_itself = request.output.stream_interval is not None
        progress = StreamProgress(request.name, pauses_by_itself, began_s=self._now())
        ends: dict[int, tuple[float, float]] = {}  # the first and the last delta of each completion
        comparison = StreamComparison(request.name, self._expected[request.name])
        self._ledger.began(progress)
        try:
            async with request.stream(self._client, self._model) as stream:
                async for delta in stream:
                    now_s = self._now()
                    self._ledger.arrived(progress, len(delta.token_ids), comparison.take(delta), now_s)
                    ends[delta.index] = ends.get(delta.index, (now_s, now_s))[0], now_s
                self._ledger.done(progress, comparison.conclude(stream.result))
                for each in stream.result.completions:
                    self._ledger.seen.add(progress.began_s, *ends[each.index], len(each.token_ids), each.attempt)
        except PacelineError as error:
            self._ledger.failed(progress, error.reason or type(error).__name__, f"{type(error).__name__}: {error}")
            return False
        finally:
            self._ledger.left(progress)
        return True


def _in_random_order(requests: Sequence[ChaosRequest], chance: random.Random) -> Iterator[ChaosRequest]:
    """All of them again and again, each time in another order."""
    while True:
        yield from chance.sample(requests, len(requests))
