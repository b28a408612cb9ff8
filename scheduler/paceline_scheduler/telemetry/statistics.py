"""A line in the log that says how much is done, every few seconds in which something was."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from paceline.process.metrics import Meter
from paceline_scheduler.link.executors import LinkedExecutors

_log = structlog.get_logger(__name__)


class _Sums(NamedTuple):
    at_s: float
    prompt_tokens: float
    generation_tokens: float
    cache_queries: float
    cache_hits: float
    refused: float


class Statistics:
    """`clock` gives monotonic seconds, `num_waiting` the length of the queue."""

    def __init__(
        self, meter: Meter, executors: LinkedExecutors, num_waiting: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._meter = meter
        self._executors = executors
        self._num_waiting = num_waiting
        self._clock = clock
        self._before = self._sums()

    async def run(self, period_s: float) -> None:
        """A period of 0 means never."""
        while period_s:
            await asyncio.sleep(period_s)
            self.tell()

    def tell(self) -> None:
        """About the time since the last line, if anything happened, runs or waits."""
        before, now = self._before, self._sums()
        self._before = now
        num_waiting = self._num_waiting()
        statuses, seconds = self._executors.statuses(), max(1e-9, now.at_s - before.at_s)
        num_running = sum(status.num_running_requests for status in statuses)
        is_quiet = now.generation_tokens == before.generation_tokens and now.refused == before.refused
        if is_quiet and not num_waiting and not num_running:
            return
        num_queries = now.cache_queries - before.cache_queries
        _log.info(
            "statistics",
            num_running_requests=num_running,
            num_waiting_requests=num_waiting,
            num_refused_requests=int(now.refused - before.refused),
            prompt_tokens_per_s=round((now.prompt_tokens - before.prompt_tokens) / seconds, 1),
            generation_tokens_per_s=round((now.generation_tokens - before.generation_tokens) / seconds, 1),
            prefix_cache_hit_ratio=round((now.cache_hits - before.cache_hits) / max(1, num_queries), 3),
            kv_cache_usage_perc=round(
                sum(status.num_used_blocks for status in statuses)
                / max(1, sum(status.num_total_blocks for status in statuses)),
                3,
            ),
        )

    def _sums(self) -> _Sums:
        total = self._meter.total
        return _Sums(
            at_s=self._clock(),
            prompt_tokens=total("prompt_tokens_total"),
            generation_tokens=total("generation_tokens_total"),
            cache_queries=total("prefix_cache_queries_total"),
            cache_hits=total("prefix_cache_hits_total"),
            refused=total("admission_rejections_total"),
        )
