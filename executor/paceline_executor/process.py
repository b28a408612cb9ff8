"""The running executor: listens, loads, serves until a signal says to stop or a part of it fails, then drains."""

import asyncio
import contextlib
import gc
import os
import time
from typing import NoReturn

import structlog

from paceline.process.callbacks import watch_callbacks
from paceline.process.metrics_port import MetricsPort
from paceline.process.signals import follow_signals, until_set_or_ended
from paceline_executor.config import Config
from paceline_executor.errors import RankError
from paceline_executor.link.description import Description
from paceline_executor.link.service import ExecutorService, ServiceConfig
from paceline_executor.ranks.group import OnLost
from paceline_executor.start.loading import load

_log = structlog.get_logger()
_LAST_WORDS_S = 2.0


async def run(config: Config, on_lost: OnLost) -> bool:
    """Returns whether all work was finished then. Raises what a part fails with.

    on_lost: called where a rank is lost and this does not raise it soon.
    """
    start_s = time.monotonic()
    loop = asyncio.get_running_loop()

    def lose(error: RankError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has gone
            loop.call_soon_threadsafe(service.fail, error)
            time.sleep(_LAST_WORDS_S)
        on_lost(error)

    leaving = asyncio.Event()  # not `stopping`: a signal of this node's own must not be the second
    left = asyncio.create_task(leaving.wait())

    def leave() -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(leaving.set)

    stopping = follow_signals(again=lambda number: os._exit(128 + number))
    broken = watch_callbacks(loop)
    service = ExecutorService(
        ServiceConfig(config.host, config.port, config.health_port, tls=config.tls_dir),
        lambda: load(config, lose, leave),
    )
    port, health_port = await service.listen()
    metrics = MetricsPort(service.metrics.read)
    metrics_port = await metrics.listen(config.host, config.metrics_port)
    where = {"host": config.host, "port": port, "health_port": health_port, "metrics_port": metrics_port}
    _log.info("listening", **where, pid=os.getpid())
    try:
        loading = asyncio.create_task(service.load())
        await until_set_or_ended(stopping, loading, broken, left)
        if not loading.done():
            loading.cancel()
            return True
        description = loading.result()
        gc.collect()
        gc.freeze()  # the model's objects stay; looking through them costs steps time
        _say_ready(description, where, time.monotonic() - start_s)
        running = asyncio.create_task(service.run())
        await until_set_or_ended(stopping, running, broken, left)
        _log.info("draining", shutdown_timeout_s=config.shutdown_timeout)
        return await _drain(service, running, broken, config.shutdown_timeout)
    finally:
        metrics.close()
        await service.stop()
        _log.info("stopped")


async def _drain(
    service: ExecutorService, running: asyncio.Task[None], broken: asyncio.Future[NoReturn], timeout_s: float
) -> bool:
    """Returns whether what runs finished in time. Raises what fails meanwhile: a drain would wait for it."""
    draining = asyncio.create_task(service.drain(timeout_s))
    await asyncio.wait((draining, running, broken), return_when=asyncio.FIRST_COMPLETED)
    for part in (running, broken):
        if part.done():
            part.result()
    return await draining


def _say_ready(description: Description, where: dict[str, object], start_s: float) -> None:
    limits = description.limits
    _log.info(
        "ready",
        model=description.model,
        **where,
        device=description.device,
        num_threads=description.num_threads,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        max_num_rows=limits.num_rows,
        kv_cache_bytes=limits.num_blocks * description.geometry.bytes_per_block,
        start_s=round(start_s, 3),
    )
