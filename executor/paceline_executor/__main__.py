"""The executor process: puts the parts together, follows signals, ends with a code that says why.

Everything heavy is imported after the command line has been read, so that --help and mistakes answer at once.
"""

import asyncio
import enum
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from paceline_executor import errors
from paceline_executor.config import Config, parse_config


class ExitCode(enum.IntEnum):
    """Why the process ended; `--help` explains them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    MODEL = 3
    PORT = 4
    MACHINE = 5
    DRAIN_TIMEOUT = 6


_CODES: tuple[tuple[type[errors.ExecutorError], ExitCode], ...] = (
    (errors.ModelError, ExitCode.MODEL),
    (errors.PortError, ExitCode.PORT),
    (errors.LimitError, ExitCode.USAGE),
    (errors.StartError, ExitCode.MACHINE),
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run an executor until it is told to stop; never returns."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # Until the event loop follows them: nothing has begun that could fail.
        signal.signal(number, lambda *_: os._exit(ExitCode.OK))
    config = parse_config(arguments)

    import uvloop

    from paceline_executor.logs import set_up_logs

    set_up_logs(config.log_level)
    try:
        code = uvloop.run(_run(config))
    except errors.ExecutorError as error:
        print(f"paceline-executor: error: {error}", file=sys.stderr)
        code = next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)
    except Exception:
        import structlog

        structlog.get_logger().exception("failed")
        print("paceline-executor: error: unexpected failure; its log says more", file=sys.stderr)
        code = ExitCode.FAILED
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End without waiting for the step thread, which may be inside native code, or for libraries' exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _run(config: Config) -> ExitCode:
    import structlog

    from paceline_executor.link.service import ExecutorService, ServiceConfig
    from paceline_executor.loading import load

    log = structlog.get_logger()
    start_s = time.monotonic()
    stopping = _follow_signals()
    service = ExecutorService(ServiceConfig(config.host, config.port, config.health_port), lambda: load(config))
    port, health_port = await service.listen()
    log.info("listening", host=config.host, port=port, health_port=health_port, pid=os.getpid())
    try:
        loading = asyncio.create_task(service.load())
        await _first(loading, stopping)
        if not loading.done():
            loading.cancel()
            return ExitCode.OK
        description = loading.result()
        gc.collect()
        gc.freeze()  # the model's objects stay; looking through them again and again would cost steps time
        limits = description.limits
        log.info(
            "ready",
            model=description.model,
            host=config.host,
            port=port,
            health_port=health_port,
            device=description.device,
            num_threads=description.num_threads,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_rows=limits.num_rows,
            kv_cache_bytes=limits.num_blocks * description.geometry.bytes_per_block,
            start_s=round(time.monotonic() - start_s, 3),
        )
        running = asyncio.create_task(service.run())
        await _first(running, stopping)
        if running.done():
            running.result()
        log.info("draining", shutdown_timeout_s=config.shutdown_timeout)
        has_drained = await service.drain(config.shutdown_timeout)
        return ExitCode.OK if has_drained else ExitCode.DRAIN_TIMEOUT
    finally:
        await service.stop()
        log.info("stopped")


def _follow_signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second one ends the process at once."""
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            _leave(128 + number)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stopping


async def _first(task: "asyncio.Task[object]", stopping: asyncio.Event) -> None:
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


if __name__ == "__main__":
    main()
