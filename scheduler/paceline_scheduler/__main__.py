"""The scheduler process: joins edge, driver and links, follows signals, ends with a code that says why.

What is heavy to import is imported after the command line has been read, so that --help and mistakes answer at once.
"""

import asyncio
import contextlib
import enum
import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from paceline_scheduler.config import Config, parse_config, prepare_grpc
from paceline_scheduler.errors import ConfigError, PortError

if TYPE_CHECKING:
    from paceline_scheduler.api.edge import Edge
    from paceline_scheduler.link.driver import Driver
    from paceline_scheduler.link.fleet import Fleet
    from paceline_scheduler.servicer_ports import SchedulerPorts

_GIVE_UP_S = 1.0  # for clients to read that their request was given up
_SETTLE_S = 0.5  # for executors to hear how the last requests ended


class ExitCode(enum.IntEnum):
    """Why the process ended; `--help` explains them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PORT = 4
    DRAIN_TIMEOUT = 6


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a scheduler until it is told to stop; never returns."""
    try:
        config = parse_config(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        _complain(str(error))
        sys.exit(ExitCode.USAGE)
    prepare_grpc()

    import uvloop

    from paceline_scheduler.logs import set_up_logs

    set_up_logs(config.log_level)
    try:
        code = uvloop.run(_run(config))
    except PortError as error:
        _complain(str(error))
        code = ExitCode.PORT
    except Exception:
        import structlog

        structlog.get_logger().exception("failed")
        _complain("unexpected failure; the log says more")
        code = ExitCode.FAILED
    _leave(code)


async def _run(config: Config) -> ExitCode:
    import structlog

    log = structlog.get_logger()
    stopping, hurrying = _follow_signals()
    driver, edge, ports, fleet = _assemble(config)
    numbers = await ports.listen(config)
    where = {
        "host": config.host,
        "port": numbers.port,
        "admin_port": numbers.admin_port,
        "health_port": numbers.health_port,
    }
    gc.collect()
    gc.freeze()  # the program's own objects stay; looking through them again and again would cost steps time
    log.info("listening", pid=os.getpid(), scheduler_id=fleet.scheduler_id, **where)

    def readiness_changed(is_ready: bool) -> None:
        ports.set_ready(is_ready)
        if is_ready:
            log.info("ready", models=[model.name for model in driver.models()], **where)
        elif not stopping.is_set():
            log.warning("not_ready", reason="no executor serves; new requests are refused until one does")

    driver.connect(edge, readiness_changed)
    links = asyncio.create_task(fleet.run(), name="links")
    try:
        await _first(links, stopping)
        if links.done():
            links.result()
        log.info("draining", shutdown_timeout_s=config.shutdown_timeout_s)
        return await _drain(driver, edge, links, config.shutdown_timeout_s, hurrying)
    finally:
        await _end(links)
        await ports.stop()
        await edge.texts.close()
        log.info("stopped")


def _assemble(config: Config) -> "tuple[Driver, Edge, SchedulerPorts, Fleet]":
    """Build the object graph of the process."""
    import random
    import secrets
    from datetime import datetime

    from paceline_scheduler.api.edge import Edge
    from paceline_scheduler.api.limits import EdgeLimits
    from paceline_scheduler.api.servicer_admin import AdminServicer
    from paceline_scheduler.api.servicer_inference import InferenceServicer
    from paceline_scheduler.api.texts import Texts
    from paceline_scheduler.core.core import Core
    from paceline_scheduler.core.limits import CoreLimits
    from paceline_scheduler.link.discovery import Discovery, resolve_with_system
    from paceline_scheduler.link.driver import Driver
    from paceline_scheduler.link.fleet import Fleet
    from paceline_scheduler.link.identity import Identity
    from paceline_scheduler.link.tokenizers import TokenizerShelf
    from paceline_scheduler.link.transport_grpc import GrpcTransport
    from paceline_scheduler.servicer_ports import SchedulerPorts

    clock = time.monotonic
    core_limits = CoreLimits(
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    edge_limits = EdgeLimits()
    identity = Identity(secrets.token_hex(8))
    driver = Driver(lambda: Core(core_limits), clock, asyncio.get_running_loop())
    texts = Texts(edge_limits, lambda: datetime.now().astimezone())
    edge = Edge(driver, texts, edge_limits)
    ports = SchedulerPorts(InferenceServicer(edge), AdminServicer(driver, identity.scheduler_id))
    discovery = Discovery(config.executors, resolve_with_system)
    # Reading a vocabulary keeps the event loop waiting: better before the first request than during it.
    tokenizers = TokenizerShelf(texts.prepare)
    fleet = Fleet(discovery, GrpcTransport(clock), identity, driver, clock, random.random, tokenizers)
    return driver, edge, ports, fleet


async def _drain(
    driver: "Driver", edge: "Edge", links: asyncio.Task[NoReturn], timeout_s: float, hurrying: asyncio.Event
) -> ExitCode:
    """Take nothing new, let what runs finish; what does not in time, or is hurried, is given up."""
    driver.begin_drain()
    edge.drain("the scheduler is shutting down", timeout_s)
    finished = asyncio.create_task(edge.drained())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_first(finished, hurrying), timeout_s)
    if not finished.done():
        await _end(links)
        driver.give_up("the scheduler is shutting down; send the request again")
        await asyncio.wait((finished,), timeout=_GIVE_UP_S)
        finished.cancel()
        return ExitCode.DRAIN_TIMEOUT
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(driver.wait_until_settled(), _SETTLE_S)
    return ExitCode.OK


async def _end(links: asyncio.Task[NoReturn]) -> None:
    """Stop driving executors; they keep what they have for whoever attaches next."""
    links.cancel()
    await asyncio.gather(links, return_exceptions=True)


def _follow_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return events that the first and the second SIGTERM or SIGINT set."""
    stopping, hurrying = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurrying if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stopping, hurrying


async def _first(task: "asyncio.Task[object]", event: asyncio.Event) -> None:
    """Wait until the task is done or the event set."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def _complain(sentence: str) -> None:
    print(f"paceline-scheduler: error: {sentence}", file=sys.stderr)


def _leave(code: int) -> NoReturn:
    """End without waiting for threads of libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
